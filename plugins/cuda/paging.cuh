// Which tokens a row sees, where they lie in the pool, and which sequence a piece of work belongs to.
#pragma once

#include "kernels.h"
#include "swizzle.cuh"

namespace qwenrt::cuda {

// Tokens [begin, end) of a sequence.
struct Span {
    int begin;
    int end;
};

// One sequence of the step.
struct Sequence {
    int first_row;
    int rows;
    int length;              // tokens in the cache after this step, at most what the block table can name
    int index;
};

__device__ __forceinline__ const int32_t* block_table(const Params& p, int index) {
    return p.args.block_tables + static_cast<int64_t>(index) * p.args.shape.max_blocks;
}

__device__ __forceinline__ Sequence load_sequence(const Params& p, int index) {
    const PagedAttentionArgs& args = p.args;
    const int first = args.query_start[index];
    const int capacity = args.shape.max_blocks << p.block_shift;
    return {first, args.query_start[index + 1] - first, max(0, min(args.seq_lens[index], capacity)), index};
}

__device__ __forceinline__ bool decodes(const Params& p, int rows) { return rows * p.group <= kDecodeRows; }

// What a row attends to whose own token is the last before `end`.
__device__ __forceinline__ Span window_before(const Params& p, int end) {
    const int window = p.args.shape.sliding_window;
    return {window < 0 ? 0 : max(0, end - window), end};
}

// What the row at `position` attends to; empty where end <= begin.
__device__ __forceinline__ Span visible(const Params& p, int position, int length) {
    return window_before(p, position < length ? max(position, -1) + 1 : length);
}

// What the rows of a decoding sequence attend to, taken together.
__device__ __forceinline__ Span visible_to_any(const Params& p, const Sequence& sequence) {
    Span all{INT32_MAX, 0};
    for (int row = 0; row < sequence.rows; ++row) {
        const Span one = visible(p, p.args.positions[sequence.first_row + row], sequence.length);
        all = {min(all.begin, one.begin), max(all.end, one.end)};
    }
    return all.begin < all.end ? all : Span{0, 0};
}

__device__ __forceinline__ int tiles_of(Span span) {
    return (span.end + kTile - 1) / kTile - span.begin / kTile;
}

// The s with start[s] <= value < start[s + 1] among num + 1 ascending entries, or -1. A warp's work, the same for all lanes.
__device__ __forceinline__ int owner(const int32_t* start, int num, int value) {
    int found = -1;
    for (int s = static_cast<int>(threadIdx.x) % kWarp; s < num; s += kWarp) {
        if (start[s] <= value && value < start[s + 1]) found = s;
    }
    return __reduce_max_sync(kFullWarp, found);
}

// What the stored numbers of a KV head are to be multiplied by.
__device__ __forceinline__ float scale_of(const float* scales, int kv_head) {
    return scales == nullptr ? 1.0f : scales[kv_head];
}

// The K or V rows of one KV head in the pool.
template <typename C, int D>
struct PagedRows {
    const Params& p;
    const C* head;  // slot 0 of this head in block 0

    __device__ __forceinline__ static PagedRows of(const Params& p, int kv_head, bool value) {
        const int64_t part = (value ? p.args.shape.num_kv_heads : 0) + kv_head;
        return {p, static_cast<const C*>(p.args.kv_cache_out) + part * p.head_stride};
    }
    __device__ __forceinline__ bool holds(int block) const {
        return static_cast<unsigned>(block) < static_cast<unsigned>(p.args.shape.num_blocks);
    }
    __device__ __forceinline__ const C* row(int block, int slot) const {
        return head + block * p.block_stride + slot * D;
    }
};

}  // namespace qwenrt::cuda

// What the kernels of this folder share: tile sizes, the workspace, and the launchers that paged_attention.cu calls.
#pragma once

#include <algorithm>

#include "element.h"
#include "launch.h"
#include "paged_attention.h"
#include "warp.h"

namespace qwenrt::cuda {

constexpr int kTile = 64;             // tokens of K and V that a block works on at a time
constexpr int kDecodeRows = 16;       // (token, head) rows of one sequence and KV head in the decode kernel: one m16 tile
constexpr int kPrefillRows = 128;     // the same in the prefill kernel
constexpr int kDecodeBlocksPerSm = 2;
constexpr int kMaxDecodeBlocks = 512;  // bounds the workspace; above two blocks on each SM of the largest devices
constexpr int kMaxGroup = 16;

// Device pointers into the workspace.
//
// The plan: sequence s has decode_start[s+1] - decode_start[s] tiles of K and V in the decode kernel (per KV head) and
// prefill_start[s+1] - prefill_start[s] tiles of rows in the prefill kernel; one of the two is 0.
// The partials: decode block b may leave two unfinished results, slots 2b and 2b+1, each of kDecodeRows rows.
struct Workspace {
    int32_t* decode_start;    // [S+1]
    int32_t* prefill_start;   // [S+1]
    float* partial_out;       // [2 * kMaxDecodeBlocks, kDecodeRows, D], not yet divided by the sum
    float* partial_max;       // [2 * kMaxDecodeBlocks, kDecodeRows], of the scores in powers of two
    float* partial_sum;       // [2 * kMaxDecodeBlocks, kDecodeRows], of 2^(score - max)

    size_t bytes;             // of it all

    static Workspace at(void* memory, int32_t num_seqs, int32_t head_dim);
};

// Everything a kernel may need, passed by value.
struct Params {
    PagedAttentionArgs args;
    Workspace workspace;
    int32_t group;           // Hq / Hkv
    int32_t block_shift;     // log2(block_size)
    int64_t head_stride;     // elements of the pool from one head of a block to the next
    int64_t block_stride;    // and from one block to the next
    float scale_log2;        // scale * log2(e): softmax works in powers of two
};

cudaError_t launch_rope_cache(const Params& params);
cudaError_t launch_decode(const Params& params);
cudaError_t launch_prefill(const Params& params);

template <typename T, typename C, int D>
struct KernelTypes {
    using Element = T;
    using CacheElement = C;
    static constexpr int kHeadDim = D;
};

// Calls launch(KernelTypes<element, cache element, head_dim>{}) for the types of the shape, which must be a supported one.
template <typename Launch>
cudaError_t dispatch(const PagedAttentionShape& shape, Launch launch) {
    const auto by_dim = [&](auto element, auto cache) {
        using T = decltype(element);
        using C = decltype(cache);
        return shape.head_dim == 64 ? launch(KernelTypes<T, C, 64>{}) : launch(KernelTypes<T, C, 128>{});
    };
    const bool narrow = shape.kv_dtype == DataType::kFloat8E4M3;
    if (shape.dtype == DataType::kFloat16) {
        return narrow ? by_dim(__half{}, __nv_fp8_e4m3{}) : by_dim(__half{}, __half{});
    }
    return narrow ? by_dim(__nv_bfloat16{}, __nv_fp8_e4m3{}) : by_dim(__nv_bfloat16{}, __nv_bfloat16{});
}

}  // namespace qwenrt::cuda

// Attention of sequences with few rows in the step: split over K and V, then reduced.
//
// All (token, head) rows of one sequence and KV head form one m16 tile, so K and V are read once. The work is a list of
// tiles of kTile tokens: sequences in order, within each its KV heads, within each its tiles. Every block takes an equal
// run of that list, whatever the sequences' lengths. Within a block the four warps are independent: each has its own 16
// tokens of every tile, its own ring of copies and its own softmax state; they are merged where the run passes to another
// KV head. A head that one block did whole is written to attn; parts go to the workspace, and a second kernel adds them up.
#include "narrow.cuh"
#include "paging.cuh"
#include "softmax.cuh"

namespace qwenrt::cuda {
namespace {

constexpr int kWarps = kTile / 16;
constexpr int kThreads = kWarps * kWarp;
constexpr int kStages = 3;
constexpr int kSlice = 16;  // tokens of a tile that one warp works on

template <typename C, int D>
struct Shared {
    static constexpr int kRowBytes = D * static_cast<int>(sizeof(C));
    static constexpr int kHalfStage = kSlice * kRowBytes;                       // K or V of a slice
    static constexpr int kRing = kWarps * kStages * 2 * kHalfStage;
    static constexpr int kMergeStride = D + 8;                                  // floats; avoids bank conflicts
    static constexpr int kMergeOut = kWarps * kDecodeRows * kMergeStride * static_cast<int>(sizeof(float));
    static constexpr int kMerge = kMergeOut + 2 * kWarps * kDecodeRows * static_cast<int>(sizeof(float));
    static constexpr int kBytes = kRing > kMerge ? kRing : kMerge;              // the ring is drained before the merge
};

// A run of tiles of one sequence and KV head.
struct Segment {
    Sequence sequence;
    int kv_head;
    int begin, end;       // tiles, counted from the first visible one
    int num_tiles;        // of this sequence and KV head in all
    int slot;             // of the partial result, where the segment is not the whole
};

// First tile of block b's run, of `total` tiles shared by `blocks` blocks, none of them idle; block_of is the other way round.
__device__ __forceinline__ int run_begin(int b, int total, int blocks) {
    return static_cast<int>(static_cast<int64_t>(b) * total / blocks);
}
__device__ __forceinline__ int block_of(int tile, int total, int blocks) {
    return static_cast<int>(((static_cast<int64_t>(tile) + 1) * blocks - 1) / total);
}

// Row r of the m16 tile is token r / group of the sequence's rows and head kv_head * group + r % group.
__device__ __forceinline__ int64_t attn_offset(const Params& p, const Sequence& sequence, int kv_head, int row, int head_dim) {
    const int64_t token = sequence.first_row + row / p.group;
    return (token * p.args.shape.num_heads + kv_head * p.group + row % p.group) * head_dim;
}

// One warp's work on one segment.
template <typename T, typename C, int D>
struct Warp {
    using Layout = Shared<C, D>;
    static constexpr int kPieces = Layout::kRowBytes / 16;
    static constexpr bool kNarrow = sizeof(C) == 1;

    const Params& p;
    const Segment& segment;
    unsigned char* ring;
    int warp, lane;
    Span span;                // tokens that may be read
    int first_token;          // of this warp in the segment's first tile
    PagedRows<C, D> keys, values;
    Span row_span[2];         // what rows g and g + 8 see
    uint32_t query[D / 16][4];
    float out[D / 8][4];
    RowPair rows;
    float scale_log2;
    int table_entries;        // lane l: the block of this warp's slice 32 * n + l

    __device__ __forceinline__ Warp(const Params& params, const Segment& work, unsigned char* shared, int warp_index)
        : p(params), segment(work), ring(shared + warp_index * kStages * 2 * Layout::kHalfStage), warp(warp_index),
          lane(static_cast<int>(threadIdx.x) % kWarp), span(visible_to_any(params, work.sequence)),
          first_token((span.begin / kTile + work.begin) * kTile + warp_index * kSlice),
          keys(PagedRows<C, D>::of(params, work.kv_head, false)), values(PagedRows<C, D>::of(params, work.kv_head, true)),
          scale_log2(params.scale_log2 * scale_of(params.args.k_scale, work.kv_head)) {
        load_query();
#pragma unroll
        for (int tile = 0; tile < D / 8; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) out[tile][i] = 0.0f;
        }
    }

    __device__ __forceinline__ void load_query() {
        const T* attn = static_cast<const T*>(p.args.attn);
        const int used = segment.sequence.rows * p.group;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = lane / 4 + 8 * half;
            const bool valid = row < used;
            const T* source = attn + (valid ? attn_offset(p, segment.sequence, segment.kv_head, row, D) : 0);
            row_span[half] = {0, 0};
            if (valid) {
                const int position = p.args.positions[segment.sequence.first_row + row / p.group];
                row_span[half] = visible(p, position, segment.sequence.length);
            }
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const T* pair = source + step * 16 + (kNarrow ? lane % 4 * 4 + k * 2 : k * 8 + lane % 4 * 2);
                    query[step][2 * k + half] = valid ? *reinterpret_cast<const uint32_t*>(pair) : 0u;
                }
            }
        }
    }

    __device__ __forceinline__ unsigned char* stage(int slice) const {
        return ring + slice % kStages * 2 * Layout::kHalfStage;
    }

    // Starts the copies of slice `slice` of this segment. Slices are loaded in order.
    __device__ __forceinline__ void load(int slice) {
        if (slice % kWarp == 0) {
            const int column = (first_token + (slice + lane) * kTile) >> p.block_shift;
            table_entries = column < p.args.shape.max_blocks ? block_table(p, segment.sequence.index)[column] : -1;
        }
        const int block = __shfl_sync(kFullWarp, table_entries, slice % kWarp);
        const int token = first_token + slice * kTile;
        const int slot = token & (p.args.shape.block_size - 1);
        const bool held = keys.holds(block);
        const C* key = keys.row(held ? block : 0, slot);
        const C* value = values.row(held ? block : 0, slot);
        constexpr int kRows = kWarp / kPieces;  // in one pass of all lanes
        const int first = lane / kPieces, piece = lane % kPieces;
        unsigned char* const target = stage(slice);
#pragma unroll
        for (int row = first; row < first + kSlice; row += kRows) {
            const bool valid = held && token + row >= span.begin && token + row < span.end;
            const int place = swizzled<Layout::kRowBytes>(row, piece);
            const int source = row * D + piece * (16 / static_cast<int>(sizeof(C)));
            cp_async_16(target + place, key + source, valid);
            cp_async_16(target + Layout::kHalfStage + place, value + source, valid);
        }
    }

    __device__ __forceinline__ void score(const unsigned char* key, float (&scores)[2][4]) const {
        if constexpr (kNarrow) {
#pragma unroll
            for (int step = 0; step < D / 16; step += 2) {
                uint32_t fours[4];
                ldmatrix_x4(fours, key + swizzled<Layout::kRowBytes>(lane % 16, step + lane / 16));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    uint32_t b[2];
                    from_e4m3<T>(__byte_perm(fours[i], 0, kAdjacent), b[0], b[1]);
                    mma_m16n8k16<T>(scores[i % 2], query[step + i / 2], b[0], b[1]);
                }
            }
        } else {
            const int row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
            for (int step = 0; step < D / 16; ++step) {
                uint32_t b[4];
                ldmatrix_x4(b, key + swizzled<Layout::kRowBytes>(row, 2 * step + half));
                mma_m16n8k16<T>(scores[0], query[step], b[0], b[1]);
                mma_m16n8k16<T>(scores[1], query[step], b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void mask(float (&scores)[2][4], int token) const {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int column = token + tile * 8 + lane % 4 * 2 + i % 2;
                const Span& seen = row_span[i / 2];
                if (column < seen.begin || column >= seen.end) scores[tile][i] = kNoScore;
            }
        }
    }

    __device__ __forceinline__ void accumulate(const unsigned char* value, const float (&weights)[2][4]) {
        const uint32_t a[4] = {Pair<T>::pack(weights[0][0], weights[0][1]), Pair<T>::pack(weights[0][2], weights[0][3]),
                               Pair<T>::pack(weights[1][0], weights[1][1]), Pair<T>::pack(weights[1][2], weights[1][3])};
        constexpr int kStep = kNarrow ? 4 : 2;  // fragments of output that 32 bytes of a row of V belong to
#pragma unroll
        for (int tile = 0; tile < D / 8; tile += kStep) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, value + swizzled<Layout::kRowBytes>(lane % 16, tile * 2 / kStep + lane / 16));
            if constexpr (kNarrow) {
                multiply_narrow<T>(out[tile], out[tile + 1], a, b[0], b[1]);
                multiply_narrow<T>(out[tile + 2], out[tile + 3], a, b[2], b[3]);
            } else {
                mma_m16n8k16<T>(out[tile], a, b[0], b[1]);
                mma_m16n8k16<T>(out[tile + 1], a, b[2], b[3]);
            }
        }
    }

    __device__ __forceinline__ void run() {
        const int count = segment.end - segment.begin;
#pragma unroll
        for (int slice = 0; slice < kStages - 1; ++slice) {
            if (slice < count) load(slice);
            cp_async_commit();
        }
        for (int slice = 0; slice < count; ++slice) {
            cp_async_wait<kStages - 2>();
            __syncwarp();  // the slice is here for all lanes, and all lanes are done with the one before it
            if (slice + kStages - 1 < count) load(slice + kStages - 1);
            cp_async_commit();
            const unsigned char* const key = stage(slice);
            float scores[2][4] = {};
            score(key, scores);
            mask(scores, first_token + slice * kTile);
            softmax_step(scores, out, rows, scale_log2);
            accumulate(key + Layout::kHalfStage, scores);
        }
    }

    // This warp's state to shared memory, for merge() of the whole block.
    __device__ __forceinline__ void publish(float* shared_out, float* shared_max, float* shared_sum) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp * kDecodeRows + lane / 4 + 8 * half;
            const float sum = sum_of_quad(rows.sum[half]);
            if (lane % 4 == 0) {
                shared_max[row] = rows.max[half];
                shared_sum[row] = sum;
            }
            float* const target = shared_out + row * Layout::kMergeStride;
#pragma unroll
            for (int tile = 0; tile < D / 8; tile += 2) {
                const float(&a)[4] = out[tile];
                const float(&b)[4] = out[tile + 1];
                if constexpr (kNarrow) {
                    *reinterpret_cast<float4*>(target + tile * 8 + lane % 4 * 4) =
                        make_float4(a[2 * half], b[2 * half], a[2 * half + 1], b[2 * half + 1]);
                } else {
                    float* const pair = target + tile * 8 + lane % 4 * 2;
                    *reinterpret_cast<float2*>(pair) = make_float2(a[2 * half], a[2 * half + 1]);
                    *reinterpret_cast<float2*>(pair + 8) = make_float2(b[2 * half], b[2 * half + 1]);
                }
            }
        }
    }
};

// Eight columns of one row, summed over parts that each have their own maximum.
struct Merged {
    float max = kNoScore;
    float sum = 0.0f;
    Eight out{};

    __device__ __forceinline__ void add(float part_sum, const Eight& part, float weight) {
        sum += part_sum * weight;
#pragma unroll
        for (int i = 0; i < 8; ++i) out.v[i] += part.v[i] * weight;
    }

    __device__ __forceinline__ Eight normalised(float scale) const {
        const float factor = sum > 0.0f ? scale / sum : 0.0f;  // a row that sees nothing is zero
        Eight result;
#pragma unroll
        for (int i = 0; i < 8; ++i) result.v[i] = out.v[i] * factor;
        return result;
    }
};

// Adds up what the four warps published; writes attn, or the segment's partial result.
template <typename T, typename C, int D>
__device__ __forceinline__ void merge(const Params& p, const Segment& segment, const float* shared_out,
                                      const float* shared_max, const float* shared_sum) {
    const bool whole = segment.end - segment.begin == segment.num_tiles;
    const int used = segment.sequence.rows * p.group;
    for (int i = static_cast<int>(threadIdx.x); i < used * (D / 8); i += kThreads) {
        const int row = i / (D / 8), column = i % (D / 8) * 8;
        Merged merged;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) merged.max = fmaxf(merged.max, shared_max[warp * kDecodeRows + row]);
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const int part = warp * kDecodeRows + row;
            merged.add(shared_sum[part], load_eight(shared_out + part * Shared<C, D>::kMergeStride + column),
                       fast_exp2(shared_max[part] - finite(merged.max)));
        }
        if (whole) {
            T* attn = static_cast<T*>(p.args.attn) + attn_offset(p, segment.sequence, segment.kv_head, row, D);
            store_eight(attn + column, merged.normalised(scale_of(p.args.v_scale, segment.kv_head)));
            continue;
        }
        const int64_t part = static_cast<int64_t>(segment.slot) * kDecodeRows + row;
        store_eight(p.workspace.partial_out + part * D + column, merged.out);
        if (column == 0) {
            p.workspace.partial_max[part] = merged.max;
            p.workspace.partial_sum[part] = merged.sum;
        }
    }
}

template <typename T, typename C, int D>
__global__ void __launch_bounds__(kThreads, kDecodeBlocksPerSm) decode_kernel(const Params p) {
    QWENRT_SHARED_MEMORY(shared);
    using Layout = Shared<C, D>;
    float* const shared_out = reinterpret_cast<float*>(shared);
    float* const shared_max = reinterpret_cast<float*>(shared + Layout::kMergeOut);
    float* const shared_sum = shared_max + kWarps * kDecodeRows;

    const int num_seqs = p.args.shape.num_seqs, num_kv_heads = p.args.shape.num_kv_heads;
    const int total = p.workspace.decode_start[num_seqs] * num_kv_heads;
    const int block = static_cast<int>(blockIdx.x), blocks = min(static_cast<int>(gridDim.x), total);
    if (block >= blocks) return;
    const int run_end = run_begin(block + 1, total, blocks);
    int at = run_begin(block, total, blocks);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    for (int s = owner(p.workspace.decode_start, num_seqs, at / num_kv_heads); at < run_end; ++s) {
        const int start = p.workspace.decode_start[s] * num_kv_heads;
        const int num_tiles = p.workspace.decode_start[s + 1] - p.workspace.decode_start[s];
        if (num_tiles == 0) continue;
        const Sequence sequence = load_sequence(p, s);
        for (int head = (at - start) / num_tiles; head < num_kv_heads && at < run_end; ++head) {
            const int head_start = start + head * num_tiles;
            const int end = min(run_end, head_start + num_tiles);
            const Segment segment{sequence, head, at - head_start, end - head_start, num_tiles,
                                  2 * block + (at == head_start ? 1 : 0)};
            Warp<T, C, D> work(p, segment, shared, warp);
            work.run();
            __syncthreads();  // every warp is done with the ring
            work.publish(shared_out, shared_max, shared_sum);
            __syncthreads();  // all warps have published
            merge<T, C, D>(p, segment, shared_out, shared_max, shared_sum);
            __syncthreads();  // the ring may be filled again
            at = end;
        }
    }
}

// Adds up the parts of one sequence and KV head, where there is more than one.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads) combine_kernel(const Params p, int decode_blocks) {
    const int num_kv_heads = p.args.shape.num_kv_heads;
    const int s = static_cast<int>(blockIdx.x) / num_kv_heads, head = static_cast<int>(blockIdx.x) % num_kv_heads;
    const int total = p.workspace.decode_start[p.args.shape.num_seqs] * num_kv_heads;
    const int num_tiles = p.workspace.decode_start[s + 1] - p.workspace.decode_start[s];
    if (num_tiles == 0) return;
    const int blocks = min(decode_blocks, total);
    const int start = p.workspace.decode_start[s] * num_kv_heads + head * num_tiles;
    const int first = block_of(start, total, blocks), last = block_of(start + num_tiles - 1, total, blocks);
    if (first == last) return;
    const Sequence sequence = load_sequence(p, s);
    const auto slot = [&](int block) { return static_cast<int64_t>(2 * block + (block == first ? 1 : 0)) * kDecodeRows; };
    for (int i = static_cast<int>(threadIdx.x); i < sequence.rows * p.group * (D / 8); i += kThreads) {
        const int row = i / (D / 8), column = i % (D / 8) * 8;
        Merged merged;
        for (int b = first; b <= last; ++b) merged.max = fmaxf(merged.max, p.workspace.partial_max[slot(b) + row]);
        for (int b = first; b <= last; ++b) {
            const int64_t part = slot(b) + row;
            merged.add(p.workspace.partial_sum[part], load_eight(p.workspace.partial_out + part * D + column),
                       fast_exp2(p.workspace.partial_max[part] - finite(merged.max)));
        }
        T* attn = static_cast<T*>(p.args.attn) + attn_offset(p, sequence, head, row, D);
        store_eight(attn + column, merged.normalised(scale_of(p.args.v_scale, head)));
    }
}

// As many blocks as the device holds at once; no more than there can be tiles.
cudaError_t num_blocks(const PagedAttentionShape& shape, int* blocks) {
    int device = 0, num_sms = 0;
    QWENRT_TRY(cudaGetDevice(&device));
    QWENRT_TRY(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    const int64_t tiles = (static_cast<int64_t>(shape.max_blocks) * shape.block_size + kTile - 1) / kTile;
    const int64_t most = std::max<int64_t>(tiles, 1) * shape.num_seqs * shape.num_kv_heads;
    *blocks = static_cast<int>(std::min<int64_t>(most, std::min(num_sms * kDecodeBlocksPerSm, kMaxDecodeBlocks)));
    return cudaSuccess;
}

}  // namespace

cudaError_t launch_decode(const Params& p) {
    if (p.args.shape.num_seqs == 0) return cudaSuccess;
    int blocks = 0;
    QWENRT_TRY(num_blocks(p.args.shape, &blocks));
    return dispatch(p.args.shape, [&](auto types) {
        using Types = decltype(types);
        using T = typename Types::Element;
        using C = typename Types::CacheElement;
        constexpr int kHeadDim = Types::kHeadDim, kBytes = Shared<C, kHeadDim>::kBytes;
        const auto decode = &decode_kernel<T, C, kHeadDim>;
        QWENRT_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(decode),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
        QWENRT_TRY(QWENRT_LAUNCH(decode, dim3(blocks), dim3(kThreads), kBytes, p.args.stream, p));
        const auto combine = &combine_kernel<T, kHeadDim>;
        const dim3 grid(p.args.shape.num_seqs * p.args.shape.num_kv_heads);
        return QWENRT_LAUNCH(combine, grid, dim3(kThreads), 0, p.args.stream, p, blocks);
    });
}

}  // namespace qwenrt::cuda

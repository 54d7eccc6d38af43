// Attention of sequences with many rows in the step: prefill, chunked prefill, the prefill part of a mixed step.
//
// One block does a tile of kPrefillRows (token, head) rows of one sequence and KV head, token by token, against all the
// tokens they see, kTile at a time. Four warps hold 32 rows each: two m16 fragments share every fragment of K and V that
// ldmatrix brings, which halves the traffic from shared memory. The copy of V runs under the product of q and K, and the
// copy of the next K under the product of the weights and V.
#include "narrow.cuh"
#include "paging.cuh"
#include "softmax.cuh"

namespace qwenrt::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpRows = kPrefillRows / kWarps;
constexpr int kFragments = kWarpRows / 16;          // m16 fragments of a warp
static_assert(kThreads == kPrefillRows, "each thread finds what one row sees");
constexpr int kMinBlockSize = 16;
constexpr int kMaxEntries = kTile / kMinBlockSize;  // blocks of the pool in a tile

// The tiles are multiples of 128 bytes, so each begins in bank 0.
template <typename T, typename C, int D>
struct Shared {
    static constexpr int kQueryRowBytes = D * static_cast<int>(sizeof(T));
    static constexpr int kCacheRowBytes = D * static_cast<int>(sizeof(C));
    unsigned char query[kPrefillRows * kQueryRowBytes];  // in the end the output
    unsigned char key[kTile * kCacheRowBytes];
    unsigned char value[kTile * kCacheRowBytes];
    int row_end[kPrefillRows];            // each row sees the tokens before this, as far as the window reaches
    int table[2][kMaxEntries];            // blocks of the even and of the odd tiles
};

template <typename T, typename C, int D>
struct Tile {
    using Memory = Shared<T, C, D>;
    static constexpr int kQueryPieces = Memory::kQueryRowBytes / 16;
    static constexpr int kCachePieces = Memory::kCacheRowBytes / 16;

    static constexpr bool kNarrow = sizeof(C) == 1;
    using Weights = uint32_t[kFragments][kTile / 16][4];

    const Params& p;
    Memory& shared;
    int index;            // of the sequence
    int first_token;      // of this tile, among the sequence's rows in this step
    int kv_head;
    int thread, lane, warp;
    Span span;            // tokens that any row sees
    int seen_by_all;      // tiles that end at or before this token need no mask, where there is no window
    float out[kFragments][D / 8][4];
    RowPair rows[kFragments];

    __device__ __forceinline__ Tile(const Params& params, Memory& memory, int s, int tile, int head)
        : p(params), shared(memory), index(s), first_token(tile * (kPrefillRows / params.group)), kv_head(head),
          thread(static_cast<int>(threadIdx.x)), lane(thread % kWarp), warp(thread / kWarp) {
#pragma unroll
        for (int fragment = 0; fragment < kFragments; ++fragment) {
#pragma unroll
            for (int i = 0; i < D / 8 * 4; ++i) out[fragment][i / 4][i % 4] = 0.0f;
        }
    }

    __device__ __forceinline__ int num_tokens(const Sequence& sequence) const {
        return min(kPrefillRows / p.group, sequence.rows - first_token);
    }

    __device__ __forceinline__ T* attn(const Sequence& sequence, int row) const {
        const int64_t token = sequence.first_row + first_token + row / p.group;
        return static_cast<T*>(p.args.attn) +
               (token * p.args.shape.num_heads + kv_head * p.group + row % p.group) * D;
    }

    // What each row sees, to shared memory; what any and what all of them see, to every thread.
    __device__ __forceinline__ void find_spans(const Sequence& sequence) {
        const int tokens = num_tokens(sequence);
        const int32_t* positions = p.args.positions + sequence.first_row + first_token;
        Span any{INT32_MAX, 0};
        int first_end = INT32_MAX;
        for (int token = lane; token < tokens; token += kWarp) {
            const Span one = visible(p, positions[token], sequence.length);
            any = {min(any.begin, one.begin), max(any.end, one.end)};
            first_end = min(first_end, one.end);
        }
        any = {__reduce_min_sync(kFullWarp, any.begin), __reduce_max_sync(kFullWarp, any.end)};
        span = any.begin < any.end ? any : Span{0, 0};
        seen_by_all = __reduce_min_sync(kFullWarp, first_end);
        const int token = thread / p.group;
        shared.row_end[thread] = token < tokens ? visible(p, positions[token], sequence.length).end : 0;
    }

    __device__ __forceinline__ void load_query(const Sequence& sequence) {
        const int used = num_tokens(sequence) * p.group;
        constexpr int kRows = kThreads / kQueryPieces;  // in one pass of all threads
        const int first = thread / kQueryPieces, piece = thread % kQueryPieces;
        const int place = swizzled<Memory::kQueryRowBytes>(first, piece);
#pragma unroll 4
        for (int pass = 0; pass < kPrefillRows / kRows; ++pass) {
            const int row = first + pass * kRows;
            const bool valid = row < used;
            const T* source = valid ? attn(sequence, row) + piece * 8 : static_cast<const T*>(p.args.attn);
            cp_async_16(shared.query + place + pass * kRows * Memory::kQueryRowBytes, source, valid);
        }
    }

    // Puts each 16 columns of this thread's row of the query in the order of narrow.cuh: pairs 0 2 4 6, then 1 3 5 7.
    __device__ __forceinline__ void reorder_query() {
#pragma unroll 1
        for (int piece = 0; piece < kQueryPieces; piece += 2) {
            auto* const first = reinterpret_cast<uint4*>(shared.query + swizzled<Memory::kQueryRowBytes>(thread, piece));
            auto* const second = reinterpret_cast<uint4*>(shared.query + swizzled<Memory::kQueryRowBytes>(thread, piece + 1));
            const uint4 a = *first, b = *second;
            *first = make_uint4(a.x, a.z, b.x, b.z);
            *second = make_uint4(a.y, a.w, b.y, b.w);
        }
    }

    // The block of entry `thread` of a tile; fetched well before it is needed, then put in shared.table.
    __device__ __forceinline__ int fetch_entry(int tile) const {
        const int column = ((tile * kTile) >> p.block_shift) + thread;
        return thread < kMaxEntries && column < p.args.shape.max_blocks ? block_table(p, index)[column] : -1;
    }

    __device__ __forceinline__ void store_entry(int tile, int block) {
        if (thread < kMaxEntries) shared.table[tile % 2][thread] = block;
    }

    __device__ __forceinline__ void load(unsigned char* target, bool value, int tile) {
        const PagedRows<C, D> source = PagedRows<C, D>::of(p, kv_head, value);
        const int slots = p.args.shape.block_size - 1;
        constexpr int kRows = kThreads / kCachePieces;  // in one pass of all threads
        const int own = recomputed(thread), first = own / kCachePieces, piece = own % kCachePieces;
        const int place = swizzled<Memory::kCacheRowBytes>(first, piece);
#pragma unroll 2  // more addresses at once would spill
        for (int pass = 0; pass < kTile / kRows; ++pass) {
            const int row = first + pass * kRows;
            const int token = tile * kTile + row;
            const int block = shared.table[tile % 2][row >> p.block_shift];
            const bool valid = source.holds(block) && token >= span.begin && token < span.end;
            const C* from = source.row(valid ? block : 0, token & slots) + piece * (16 / static_cast<int>(sizeof(C)));
            cp_async_16(target + place + pass * kRows * Memory::kCacheRowBytes, from, valid);
        }
    }

    __device__ __forceinline__ void score(float (&scores)[kFragments][kTile / 8][4]) const {
        const int query = recomputed(swizzled<Memory::kQueryRowBytes>(warp * kWarpRows + lane % 16, lane / 16));
        const int key = recomputed(kNarrow ? swizzled<Memory::kCacheRowBytes>(lane, 0)
                                           : swizzled<Memory::kCacheRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2));
#pragma unroll
        for (int step = 0; step < D / 16; ++step) {
            uint32_t a[kFragments][4];
#pragma unroll
            for (int fragment = 0; fragment < kFragments; ++fragment) {
                const unsigned char* const first_row = shared.query + fragment * 16 * Memory::kQueryRowBytes;
                ldmatrix_x4(a[fragment], first_row + (query ^ step * 32));
            }
            constexpr int kStep = kNarrow ? 4 : 2;  // fragments of scores from one load
#pragma unroll
            for (int tile = 0; tile < kTile / 8; tile += kStep) {
                uint32_t loaded[4], b[2];
                ldmatrix_x4(loaded, shared.key + tile * 8 * Memory::kCacheRowBytes + (key ^ step * (64 / kStep)));
#pragma unroll
                for (int i = 0; i < kStep; ++i) {
                    if constexpr (kNarrow) {
                        from_e4m3<T>(__byte_perm(loaded[i], 0, kAdjacent), b[0], b[1]);
                    } else {
                        b[0] = loaded[2 * i];
                        b[1] = loaded[2 * i + 1];
                    }
#pragma unroll
                    for (int fragment = 0; fragment < kFragments; ++fragment) {
                        mma_m16n8k16<T>(scores[fragment][tile + i], a[fragment], b[0], b[1]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void mask(float (&scores)[kFragments][kTile / 8][4], int token) const {
#pragma unroll
        for (int fragment = 0; fragment < kFragments; ++fragment) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Span seen = window_before(p, shared.row_end[warp * kWarpRows + fragment * 16 + half * 8 + lane / 4]);
#pragma unroll
                for (int tile = 0; tile < kTile / 8; ++tile) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const int column = token + tile * 8 + lane % 4 * 2 + i;
                        if (column < seen.begin || column >= seen.end) scores[fragment][tile][2 * half + i] = kNoScore;
                    }
                }
            }
        }
    }

    // Scores to weights, as the first operand of the product with V: in registers, the accumulator of one product is laid
    // out as that operand of the next.
    __device__ __forceinline__ void weigh(float (&scores)[kFragments][kTile / 8][4], Weights& weights, float scale_log2) {
#pragma unroll
        for (int fragment = 0; fragment < kFragments; ++fragment) {
            softmax_step(scores[fragment], out[fragment], rows[fragment], scale_log2);
#pragma unroll
            for (int step = 0; step < kTile / 16; ++step) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&pair)[4] = scores[fragment][2 * step + i / 2];
                    weights[fragment][step][i] = Pair<T>::pack(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
                }
            }
        }
    }

    __device__ __forceinline__ void accumulate(const Weights& weights) {
        const int value = recomputed(swizzled<Memory::kCacheRowBytes>(lane % 16, lane / 16));
#pragma unroll
        for (int step = 0; step < kTile / 16; ++step) {
            constexpr int kStep = kNarrow ? 4 : 2;  // fragments of output that 32 bytes of a row of V belong to
#pragma unroll
            for (int tile = 0; tile < D / 8; tile += kStep) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, shared.value + step * 16 * Memory::kCacheRowBytes + (value ^ tile * (32 / kStep)));
#pragma unroll
                for (int fragment = 0; fragment < kFragments; ++fragment) {
                    const uint32_t(&a)[4] = weights[fragment][step];
                    if constexpr (kNarrow) {
                        multiply_narrow<T>(out[fragment][tile], out[fragment][tile + 1], a, b[0], b[1]);
                        multiply_narrow<T>(out[fragment][tile + 2], out[fragment][tile + 3], a, b[2], b[3]);
                    } else {
                        mma_m16n8k16<T>(out[fragment][tile], a, b[0], b[1]);
                        mma_m16n8k16<T>(out[fragment][tile + 1], a, b[2], b[3]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void run() {
        const Sequence sequence = load_sequence(p, index);
        find_spans(sequence);
        const int begin = span.begin / kTile, end = (span.end + kTile - 1) / kTile;
        store_entry(begin, fetch_entry(begin));
        __syncthreads();  // the spans and the first tile's blocks are known to all
        load_query(sequence);
        load(shared.key, false, begin);
        cp_async_commit();
        if constexpr (kNarrow) {
            cp_async_wait<0>();
            __syncthreads();  // the query is here
            reorder_query();
        }
        const float scale_log2 = p.scale_log2 * scale_of(p.args.k_scale, kv_head);
        for (int tile = begin; tile < end; ++tile) {
            cp_async_wait<0>();
            __syncthreads();  // K is here; every warp is done with the V before
            load(shared.value, true, tile);
            cp_async_commit();
            const int next_entry = fetch_entry(tile + 1);
            float scores[kFragments][kTile / 8][4] = {};
            score(scores);
            store_entry(tile + 1, next_entry);
            if (p.args.shape.sliding_window >= 0 || (tile + 1) * kTile > seen_by_all) mask(scores, tile * kTile);
            Weights weights;
            weigh(scores, weights, scale_log2);
            cp_async_wait<0>();
            __syncthreads();  // V is here; every warp is done with K; the next tile's blocks are known to all
            if (tile + 1 < end) load(shared.key, false, tile + 1);
            cp_async_commit();
            accumulate(weights);
        }
        cp_async_wait<0>();  // where there is no tile: the query's own
    }

    __device__ __forceinline__ uint32_t* query_words(int row, int piece) {
        return reinterpret_cast<uint32_t*>(shared.query + swizzled<Memory::kQueryRowBytes>(row, piece));
    }

    // Each warp's rows to its own part of shared.query, from there to attn in 16-byte pieces.
    __device__ __forceinline__ void store() {
#pragma unroll
        for (int fragment = 0; fragment < kFragments; ++fragment) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = sum_of_quad(rows[fragment].sum[half]);
                const float factor = sum > 0.0f ? scale_of(p.args.v_scale, kv_head) / sum : 0.0f;  // sees nothing: zero
                const int row = warp * kWarpRows + fragment * 16 + half * 8 + lane / 4;
#pragma unroll
                for (int tile = 0; tile < D / 8; tile += 2) {
                    const float(&a)[4] = out[fragment][tile];
                    const float(&b)[4] = out[fragment][tile + 1];
                    const float a0 = a[2 * half] * factor, a1 = a[2 * half + 1] * factor;
                    const float b0 = b[2 * half] * factor, b1 = b[2 * half + 1] * factor;
                    if constexpr (kNarrow) {
                        uint32_t* const four = query_words(row, tile + lane % 4 / 2) + lane % 2 * 2;
                        four[0] = Pair<T>::pack(a0, b0);
                        four[1] = Pair<T>::pack(a1, b1);
                    } else {
                        query_words(row, tile)[lane % 4] = Pair<T>::pack(a0, a1);
                        query_words(row, tile + 1)[lane % 4] = Pair<T>::pack(b0, b1);
                    }
                }
            }
        }
        __syncwarp();
        const Sequence sequence = load_sequence(p, index);  // again: not worth registers in the main loop
        const int used = num_tokens(sequence) * p.group;
#pragma unroll
        for (int i = lane; i < kWarpRows * kQueryPieces; i += kWarp) {
            const int row = warp * kWarpRows + i / kQueryPieces, piece = i % kQueryPieces;
            if (row >= used) continue;
            const unsigned char* const source = shared.query + swizzled<Memory::kQueryRowBytes>(row, piece);
            *reinterpret_cast<uint4*>(attn(sequence, row) + piece * 8) = *reinterpret_cast<const uint4*>(source);
        }
    }
};

template <typename T, typename C, int D>
__global__ void __launch_bounds__(kThreads) prefill_kernel(const Params p) {
    QWENRT_SHARED_MEMORY(shared);
    const int num_seqs = p.args.shape.num_seqs;
    const int total = p.workspace.prefill_start[num_seqs];
    const int tile = total - 1 - static_cast<int>(blockIdx.x);  // the last tiles of a sequence see most: they go first
    if (tile < 0) return;
    const int s = owner(p.workspace.prefill_start, num_seqs, tile);
    Tile<T, C, D> work(p, *reinterpret_cast<Shared<T, C, D>*>(shared), s, tile - p.workspace.prefill_start[s],
                       static_cast<int>(blockIdx.y));
    work.run();
    work.store();
}

}  // namespace

cudaError_t launch_prefill(const Params& p) {
    const PagedAttentionShape& shape = p.args.shape;
    // A sequence is here only if its rows do not fit one decode tile, and at most one tile of each is not full.
    const int min_rows = kDecodeRows / p.group + 1;
    const int tiles = shape.num_tokens / (kPrefillRows / p.group) + std::min(shape.num_seqs, shape.num_tokens / min_rows);
    if (tiles == 0 || shape.num_seqs == 0) return cudaSuccess;
    return dispatch(shape, [&](auto types) {
        using Types = decltype(types);
        using T = typename Types::Element;
        using C = typename Types::CacheElement;
        constexpr int kHeadDim = Types::kHeadDim;
        constexpr int kBytes = static_cast<int>(sizeof(Shared<T, C, kHeadDim>));
        const auto kernel = &prefill_kernel<T, C, kHeadDim>;
        QWENRT_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
        return QWENRT_LAUNCH(kernel, dim3(tiles, shape.num_kv_heads), dim3(kThreads), kBytes, p.args.stream, p);
    });
}

}  // namespace qwenrt::cuda

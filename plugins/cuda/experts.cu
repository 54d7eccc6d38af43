// The experts' products: rows in the order of their experts, each expert's matrices read by its own rows' tiles alone.
//
// One block does a tile of rows of one expert against kTileColumns rows of a matrix, in steps of kDepth along what is summed over,
// through a ring of cp.async stages. Gate and up columns of a block belong together, so that silu(gate) * up is computed where the
// sums lie. There are two tilings. In a step of few tokens no expert has more than 16 rows and time is that of the weights: there
// the ring is deep, and four warps share the columns. Else a tile has 64 rows, and four warps, two by two, take 32 rows and half
// of the columns each; of a tile's 16-row fragments only those are computed, and copied, that have rows. The order of every sum
// is that of the depth, whatever the tiling.
#include "experts.h"
#include "ptx.h"
#include "swizzle.cuh"

namespace qwenrt::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kDepth = 64;                  // elements of a row in a stage
constexpr int kTileColumns = 128;           // rows of a matrix in a stage; where gated, half of them gate and half up
constexpr int kRowBytes = 2 * kDepth;
constexpr int kPieces = kRowBytes / 16;     // of a row in a stage
constexpr int kPassRows = kThreads / kPieces;  // rows that all threads copy at once: one 16-row fragment
constexpr float kLog2E = 1.4426950408889634f;
static_assert(kPassRows == 16);

// How a block's warps divide a tile.
template <int kRowWarpsOf, int kFragmentsOf, int kStagesOf>
struct Tiling {
    static constexpr int kRowWarps = kRowWarpsOf;                // warps one below the other
    static constexpr int kColumnWarps = kWarps / kRowWarps;      // and side by side
    static constexpr int kFragments = kFragmentsOf;              // 16-row fragments of a warp
    static constexpr int kTileRows = kRowWarps * kFragments * 16;
    static constexpr int kWarpColumns = kTileColumns / kColumnWarps;
    static constexpr int kStages = kStagesOf;

    struct Stage {
        unsigned char rows[kTileRows * kRowBytes];
        unsigned char weights[kTileColumns * kRowBytes];
    };
    static constexpr int kBytes = kStages * static_cast<int>(sizeof(Stage));
};

using FewRows = Tiling<1, 1, 5>;
using ManyRows = Tiling<2, 2, 3>;

// Some rows of an expert; none where count is 0.
struct Rows {
    int expert;
    int first;
    int count;
};

template <int kTileRows>
__device__ __forceinline__ int num_tiles(const int32_t* start, int expert) {
    return (start[expert + 1] - start[expert] + kTileRows - 1) / kTileRows;
}

// The rows of a tile, where the tiles of all experts are counted one after the other. A warp's work, the same for all lanes.
template <int kTileRows>
__device__ __forceinline__ Rows find_rows(const int32_t* start, int num_experts, int tile) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int run = (num_experts + kWarp - 1) / kWarp;
    const int begin = min(lane * run, num_experts), end = min(begin + run, num_experts);
    int own = 0;
    for (int expert = begin; expert < end; ++expert) own += num_tiles<kTileRows>(start, expert);
    int up_to = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, up_to, step);
        if (lane >= step) up_to += other;
    }
    Rows rows{0, 0, 0};
    if (tile < up_to && tile >= up_to - own) {
        int expert = begin, left = tile - (up_to - own);
        for (int tiles = num_tiles<kTileRows>(start, expert); left >= tiles; tiles = num_tiles<kTileRows>(start, ++expert)) {
            left -= tiles;
        }
        const int first = start[expert] + left * kTileRows;
        rows = {expert, first, min(kTileRows, start[expert + 1] - first)};
    }
    return {__reduce_max_sync(kFullWarp, rows.expert), __reduce_max_sync(kFullWarp, rows.first),
            __reduce_max_sync(kFullWarp, rows.count)};
}

// gated: x of the rows' tokens to silu(gate) * up; else those to the expert's output.
template <typename T, bool kGated, typename Tiling>
struct Tile {
    using Stage = typename Tiling::Stage;
    static constexpr int kTileRows = Tiling::kTileRows, kStages = Tiling::kStages;
    static constexpr int kFragments = Tiling::kFragments, kWarpColumns = Tiling::kWarpColumns;
    static constexpr int kColumns = kGated ? kTileColumns / 2 : kTileColumns;  // of the result

    const ExpertsParams& p;
    Stage* const stages;
    const Rows rows;
    const int thread, lane, row_warp, column_warp;
    const int width, depth;  // columns of the result, and what is summed over
    const int first_column;
    float sums[kFragments][kWarpColumns / 8][4];

    __device__ __forceinline__ Tile(const ExpertsParams& params, Stage* memory, const Rows& some, int column_tile)
        : p(params), stages(memory), rows(some), thread(static_cast<int>(threadIdx.x)), lane(thread % kWarp),
          row_warp(thread / kWarp % Tiling::kRowWarps), column_warp(thread / kWarp / Tiling::kRowWarps),
          width(kGated ? params.args.shape.inner : params.args.shape.hidden),
          depth(kGated ? params.args.shape.hidden : params.args.shape.inner), first_column(column_tile * kColumns) {
#pragma unroll
        for (int i = 0; i < kFragments * kWarpColumns / 2; ++i) {
            sums[i / (kWarpColumns / 2)][i / 4 % (kWarpColumns / 8)][i % 4] = 0.0f;
        }
    }

    // Row `row` of the tile, in x or in what the gated product left.
    __device__ __forceinline__ const T* source(int row) const {
        if constexpr (kGated) {
            return static_cast<const T*>(p.args.x) + static_cast<int64_t>(p.workspace.row_token[rows.first + row]) * depth;
        } else {
            return static_cast<const T*>(p.workspace.inner) + static_cast<int64_t>(rows.first + row) * depth;
        }
    }

    // Column `column` of the tile, which is a row of the matrix.
    __device__ __forceinline__ const T* weight(int column) const {
        const int64_t expert = static_cast<int64_t>(rows.expert) * (kGated ? 2 : 1) * width;
        const int64_t row = expert + column / kColumns * width + first_column + column % kColumns;
        return static_cast<const T*>(kGated ? p.args.gate_up : p.args.down) + row * depth;
    }

    // Starts the copies of a step; what is beyond the rows, the columns or the depth becomes zeros.
    __device__ __forceinline__ void load(int step, const T* const (&sources)[kTileRows / kPassRows], const T* weights) {
        Stage& stage = stages[step % kStages];
        const int first = thread / kPieces, piece = thread % kPieces;
        const int at = step * kDepth + piece * 8, place = swizzled<kRowBytes>(first, piece);
        const bool inside = at < depth;
#pragma unroll
        for (int pass = 0; pass < kTileRows / kPassRows; ++pass) {
            if (pass * kPassRows >= rows.count) break;
            const bool valid = inside && pass * kPassRows + first < rows.count;
            cp_async_16(stage.rows + place + pass * kPassRows * kRowBytes, valid ? sources[pass] + at : sources[0], valid);
        }
#pragma unroll
        for (int pass = 0; pass < kTileColumns / kPassRows; ++pass) {
            const int column = pass * kPassRows % kColumns;
            const bool valid = inside && first_column + column + first < width;
            const int64_t row = pass * kPassRows / kColumns * static_cast<int64_t>(width) + column;
            cp_async_16(stage.weights + place + pass * kPassRows * kRowBytes, valid ? weights + row * depth + at : weights, valid);
        }
    }

    // Row of the stage's weights where fragment `fragment` of this warp begins: gate and then up, where gated.
    __device__ __forceinline__ int weight_row(int fragment) const {
        constexpr int kPart = kGated ? kWarpColumns / 2 : kWarpColumns;
        return fragment * 8 / kPart * kColumns + column_warp * kPart + fragment * 8 % kPart;
    }

    __device__ __forceinline__ void multiply(const Stage& stage) {
        const int active = rows.count - row_warp * kFragments * 16;
        if (active <= 0) return;
        const int row = swizzled<kRowBytes>(row_warp * kFragments * 16 + lane % 16, lane / 16);
        const int weight = swizzled<kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int step = 0; step < kDepth / 16; ++step) {
            uint32_t a[kFragments][4];
#pragma unroll
            for (int i = 0; i < kFragments; ++i) {
                if (i * 16 < active) ldmatrix_x4(a[i], stage.rows + i * 16 * kRowBytes + (row ^ step * 32));
            }
#pragma unroll
            for (int j = 0; j < kWarpColumns / 8; j += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, stage.weights + weight_row(j) * kRowBytes + (weight ^ step * 32));
#pragma unroll
                for (int i = 0; i < kFragments; ++i) {
                    if (i * 16 >= active) continue;
                    mma_m16n8k16<T>(sums[i][j], a[i], b[0], b[1]);
                    mma_m16n8k16<T>(sums[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void run() {
        const T* sources[kTileRows / kPassRows];
#pragma unroll
        for (int pass = 0; pass < kTileRows / kPassRows; ++pass) {
            sources[pass] = source(min(pass * kPassRows + thread / kPieces, rows.count - 1));
        }
        const T* const weights = weight(thread / kPieces);
        const int steps = (depth + kDepth - 1) / kDepth;
#pragma unroll
        for (int step = 0; step < kStages - 1; ++step) {
            if (step < steps) load(step, sources, weights);
            cp_async_commit();
        }
        for (int step = 0; step < steps; ++step) {
            cp_async_wait<kStages - 2>();
            __syncthreads();  // this step is here; every warp is done with the one before
            if (step + kStages - 1 < steps) load(step + kStages - 1, sources, weights);
            cp_async_commit();
            multiply(stages[step % kStages]);
        }
    }

    __device__ __forceinline__ void store() const {
        T* const target = static_cast<T*>(kGated ? p.workspace.inner : p.workspace.out);
        constexpr int kResults = kColumns / Tiling::kColumnWarps / 8;  // fragments of the result of a warp
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = (row_warp * kFragments + i) * 16 + half * 8 + lane / 4;
                if (row >= rows.count) continue;
                const int64_t first = static_cast<int64_t>(rows.first + row) * width;
#pragma unroll
                for (int j = 0; j < kResults; ++j) {
                    const int column = first_column + (column_warp * kResults + j) * 8 + lane % 4 * 2;
                    if (column >= width) continue;
                    float low = sums[i][j][2 * half], high = sums[i][j][2 * half + 1];
                    if constexpr (kGated) {
                        low = silu(low) * sums[i][j + kResults][2 * half];
                        high = silu(high) * sums[i][j + kResults][2 * half + 1];
                    }
                    *reinterpret_cast<uint32_t*>(target + first + column) = Pair<T>::pack(low, high);
                }
            }
        }
    }

    __device__ __forceinline__ static float silu(float x) { return x / (1.0f + fast_exp2(-x * kLog2E)); }
};

template <typename T, bool kGated, typename Tiling>
__device__ __forceinline__ void run_block(const ExpertsParams& p, unsigned char* shared) {
    const int index = static_cast<int>(blockIdx.y);
    const Rows rows = find_rows<Tiling::kTileRows>(p.workspace.start, p.args.shape.num_experts, index);
    if (rows.count == 0) return;
    using Stage = typename Tiling::Stage;
    Tile<T, kGated, Tiling> tile(p, reinterpret_cast<Stage*>(shared), rows, static_cast<int>(blockIdx.x));
    tile.run();
    tile.store();
}

template <typename T, bool kGated>
__global__ void __launch_bounds__(kThreads) experts_kernel(const ExpertsParams p) {
    QWENRT_SHARED_MEMORY(shared);
    run_block<T, kGated, ManyRows>(p, shared);
}

template <typename T, bool kGated>
__global__ void __launch_bounds__(kThreads) experts_few_kernel(const ExpertsParams p) {
    QWENRT_SHARED_MEMORY(shared);
    run_block<T, kGated, FewRows>(p, shared);
}

template <typename T, bool kGated, typename Tiling>
cudaError_t launch(void (*kernel)(ExpertsParams), const ExpertsParams& p) {
    const MixtureOfExpertsShape& shape = p.args.shape;
    const int width = kGated ? shape.inner : shape.hidden;
    constexpr int kColumns = Tile<T, kGated, Tiling>::kColumns, kBytes = Tiling::kBytes;
    // Of each expert that has rows, at most one tile is not full.
    const int tiles = p.pairs / Tiling::kTileRows + (p.pairs < shape.num_experts ? p.pairs : shape.num_experts);
    const dim3 grid((width + kColumns - 1) / kColumns, tiles);
    QWENRT_TRY(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    return QWENRT_LAUNCH(kernel, grid, dim3(kThreads), kBytes, p.args.stream, p);
}

}  // namespace

cudaError_t launch_experts(const ExpertsParams& p) {
    return dispatch_element(p.args.shape, [&](auto element) {
        using T = decltype(element);
        // A token has a row at most with one expert.
        if (p.args.shape.num_tokens <= FewRows::kTileRows) {
            QWENRT_TRY((launch<T, true, FewRows>(&experts_few_kernel<T, true>, p)));
            return launch<T, false, FewRows>(&experts_few_kernel<T, false>, p);
        }
        QWENRT_TRY((launch<T, true, ManyRows>(&experts_kernel<T, true>, p)));
        return launch<T, false, ManyRows>(&experts_kernel<T, false>, p);
    });
}

}  // namespace qwenrt::cuda

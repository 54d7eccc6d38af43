// Online softmax over the accumulator fragments of mma_m16n8k16: this thread's parts of rows g and g + 8.
#pragma once

#include "kernels.h"
#include "ptx.h"

namespace qwenrt::cuda {

constexpr float kNoScore = -INFINITY;

struct RowPair {
    float max[2] = {kNoScore, kNoScore};  // of the scores so far, in powers of two; the same in the four lanes of a row
    float sum[2] = {0.0f, 0.0f};          // of 2^(score - max) over this lane's columns alone
};

__device__ __forceinline__ float max_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}

__device__ __forceinline__ float sum_of_quad(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// A maximum that can be subtracted from -inf.
__device__ __forceinline__ float finite(float max) { return max == kNoScore ? 0.0f : max; }

// Turns raw scores q.k into weights 2^(score * scale_log2 - max), where a masked score is -inf, and rescales what has been
// summed under the old maximum: sum here, and `out` (any number of fragments of the same rows).
template <int kScoreTiles, int kOutTiles>
__device__ __forceinline__ void softmax_step(float (&scores)[kScoreTiles][4], float (&out)[kOutTiles][4], RowPair& rows,
                                             float scale_log2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = kNoScore;
#pragma unroll
        for (int tile = 0; tile < kScoreTiles; ++tile) {
            top = fmaxf(top, fmaxf(scores[tile][2 * half], scores[tile][2 * half + 1]));
        }
        const float max = fmaxf(rows.max[half], max_of_quad(top) * scale_log2);
        const float shift = finite(max);
        const float keep = fast_exp2(rows.max[half] - shift);
        float sum = rows.sum[half] * keep;
#pragma unroll
        for (int tile = 0; tile < kScoreTiles; ++tile) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
                scores[tile][i] = fast_exp2(fmaf(scores[tile][i], scale_log2, -shift));
                sum += scores[tile][i];
            }
        }
        rows.max[half] = max;
        rows.sum[half] = sum;
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
            out[tile][2 * half] *= keep;
            out[tile][2 * half + 1] *= keep;
        }
    }
}

}  // namespace qwenrt::cuda

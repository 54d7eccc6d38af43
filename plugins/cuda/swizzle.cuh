// Tiles in shared memory without bank conflicts.
#pragma once

namespace qwenrt::cuda {

// Where 16-byte piece `piece` of row `row` lies in a shared-memory tile with rows of kBytes bytes, such that the eight rows
// that ldmatrix reads at once, and the eight pieces that a copy writes at once, fall in different banks.
// For an even k, swizzled(row, piece + k) is swizzled(row, piece) ^ (k * 16) where piece is 0 or 1; and rows eight apart are
// 8 * kBytes apart.
template <int kBytes>
__device__ __forceinline__ int swizzled(int row, int piece) {
    constexpr int kPieces = kBytes / 16;
    static_assert(kPieces == 4 || kPieces == 8 || kPieces == 16, "rows of 64, 128 or 256 bytes");
    const int turn = kPieces == 4 ? (row >> 1) & 3 : row & 7;
    return row * kBytes + ((piece ^ turn) << 4);
}

}  // namespace qwenrt::cuda

// Products with K and V stored as e4m3, which no 16-bit fragment load or multiplication knows.
//
// ldmatrix moves pairs of bytes. Of a row of K it gives a lane four consecutive columns where a 16-bit load gives it two
// pairs that lie eight apart; both operands of a product may be permuted along the axis that is summed over, so q is loaded
// in that order too. Of V, transposed, it gives two consecutive columns of two tokens: the even columns of 16 make one
// fragment of the output and the odd ones the next, so that a lane ends up with four consecutive columns.
#pragma once

#include "ptx.h"

namespace qwenrt::cuda {

constexpr unsigned kAdjacent = 0x3120;  // __byte_perm: from_e4m3 then gives bytes 0 and 1, and bytes 2 and 3

// even and odd += a * V, where low and high are the loaded columns of the first and the last eight tokens.
template <typename T>
__device__ __forceinline__ void multiply_narrow(float (&even)[4], float (&odd)[4], const uint32_t (&a)[4], uint32_t low,
                                                uint32_t high) {
    uint32_t b[2][2];
    from_e4m3<T>(low, b[0][0], b[1][0]);
    from_e4m3<T>(high, b[0][1], b[1][1]);
    mma_m16n8k16<T>(even, a, b[0][0], b[0][1]);
    mma_m16n8k16<T>(odd, a, b[1][0], b[1][1]);
}

}  // namespace qwenrt::cuda

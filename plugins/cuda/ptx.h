// Named wrappers around the instructions that C++ has no word for. The only file with PTX in it.
//
// Every wrapper has two bodies: the one below, and the one in tests/simt/simt_ptx.h that the emulator compiles instead.
// Lanes, rows and columns are those of the PTX ISA, "Matrix multiply-accumulate operation using mma instruction".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#ifdef QWENRT_SIMT
#include "simt_ptx.h"
#else

namespace qwenrt::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes from global to shared memory; writes zeros and reads nothing where !valid. Both 16-byte aligned.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(bytes)
                 : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of this thread's groups are unfinished. Other threads see the data after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and gets
// elements (l / 4, 2 * (l % 4) + {0, 1}) of matrix i in r[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same of the transposed matrices: elements (2 * (l % 4) + {0, 1}, l / 4).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += A[16x16] * B[16x8] in float32. With g = lane / 4 and t = lane % 4: a = A(g, 2t..), A(g+8, 2t..), A(g, 2t+8..),
// A(g+8, 2t+8..); b0 = B(2t.., g), b1 = B(2t+8.., g); d = D(g, 2t), D(g, 2t+1), D(g+8, 2t), D(g+8, 2t+1).
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 numbers to two pairs of T: the numbers of bytes 0 and 2, and of bytes 1 and 3. Exact. The bits of a number are put
// where T has its exponent, which leaves it a power of two too small; subnormals come out right, the code of NaN as 480.
template <typename T>
__device__ __forceinline__ void from_e4m3(uint32_t four, uint32_t& even, uint32_t& odd);

template <>
__device__ __forceinline__ void from_e4m3<__half>(uint32_t four, uint32_t& even, uint32_t& odd) {
    const __half2 factor = __float2half2_rn(256.0f);
    const auto widen = [factor](uint32_t high_bytes) {
        const uint32_t bits = (high_bytes & 0x80008000u) | ((high_bytes & 0x7f007f00u) >> 1);
        const __half2 pair = __hmul2(reinterpret_cast<const __half2&>(bits), factor);
        return reinterpret_cast<const uint32_t&>(pair);
    };
    even = widen(four << 8);
    odd = widen(four);
}

template <>
__device__ __forceinline__ void from_e4m3<__nv_bfloat16>(uint32_t four, uint32_t& even, uint32_t& odd) {
    const __nv_bfloat162 factor = __float2bfloat162_rn(0x1p120f);
    const auto widen = [factor](uint32_t high_bytes) {
        const uint32_t bits = (high_bytes & 0x80008000u) | ((high_bytes & 0x7f007f00u) >> 4);
        const __nv_bfloat162 pair = __hmul2(reinterpret_cast<const __nv_bfloat162&>(bits), factor);
        return reinterpret_cast<const uint32_t&>(pair);
    };
    even = widen(four << 8);
    odd = widen(four);
}

// Hides where x comes from, so that what is computed from it inside a loop is not computed before the loop and kept in
// registers: eight addresses of a tile's columns cost more than the eight instructions that make them.
__device__ __forceinline__ int recomputed(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// 2^x to about two units in the last place; 2^-inf is 0.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace qwenrt::cuda

#endif

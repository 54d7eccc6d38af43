// The emulated bodies of plugins/cuda/ptx.h, which says what each does.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>

namespace simt {

// Copies are kept until the wait that they need; until then their destination is NaN.
void copy_async(void* shared, const void* global, int bytes, bool valid);
void copy_commit();
void copy_wait(int pending);

void load_matrices(uint32_t (&registers)[4], const void* row, bool transposed, int line);

// One lane's part of D += A * B.
struct Multiply {
    float (&d)[4];
    const uint32_t (&a)[4];
    uint32_t b[2];
    float2 (*unpack)(uint32_t);
};
void multiply(const Multiply& lane, int line);

}  // namespace simt

namespace qwenrt::cuda {

inline void cp_async_16(void* shared, const void* global, bool valid) { simt::copy_async(shared, global, 16, valid); }

inline void cp_async_commit() { simt::copy_commit(); }

template <int kPending>
void cp_async_wait() {
    simt::copy_wait(kPending);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
    simt::load_matrices(r, row, false, line);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, int line = __builtin_LINE()) {
    simt::load_matrices(r, row, true, line);
}

template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE());

template <>
inline void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line) {
    const auto unpack = [](uint32_t bits) { return __half22float2(reinterpret_cast<const __half2&>(bits)); };
    simt::multiply({d, a, {b0, b1}, unpack}, line);
}

template <>
inline void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line) {
    const auto unpack = [](uint32_t bits) { return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits)); };
    simt::multiply({d, a, {b0, b1}, unpack}, line);
}

// NaN stays NaN here: what is read before it is written shows.
template <typename T>
void from_e4m3(uint32_t four, uint32_t& even, uint32_t& odd) {
    const auto widen = [four](int byte) {
        const __half_raw exact = __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(four >> (8 * byte)), __NV_E4M3);
        const T wide = static_cast<T>(__half2float(__half(exact)));
        return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(wide));
    };
    even = widen(0) | widen(2) << 16;
    odd = widen(1) | widen(3) << 16;
}

inline int recomputed(int x) { return x; }

inline float fast_exp2(float x) { return std::exp2(x); }

}  // namespace qwenrt::cuda

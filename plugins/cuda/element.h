// The element types of activations and of the cache: packing, unpacking, rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace qwenrt::cuda {

// One register holding two elements; the element of the lower address in the lower half.
template <typename T>
struct Pair;

template <>
struct Pair<__half> {
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __half2 pair = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
    static __device__ __forceinline__ float2 unpack(uint32_t bits) {
        return __half22float2(reinterpret_cast<const __half2&>(bits));
    }
};

template <>
struct Pair<__nv_bfloat16> {
    static __device__ __forceinline__ uint32_t pack(float low, float high) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(pair);
    }
    static __device__ __forceinline__ float2 unpack(uint32_t bits) {
        return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(bits));
    }
};

// Eight consecutive elements, 16 bytes, as float32.
struct Eight {
    float v[8];
};

template <typename T>
__device__ __forceinline__ Eight load_eight(const T* address) {
    const uint4 bits = *reinterpret_cast<const uint4*>(address);
    const float2 a = Pair<T>::unpack(bits.x), b = Pair<T>::unpack(bits.y);
    const float2 c = Pair<T>::unpack(bits.z), d = Pair<T>::unpack(bits.w);
    return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}

template <>
__device__ __forceinline__ Eight load_eight<float>(const float* address) {
    const float4 a = reinterpret_cast<const float4*>(address)[0], b = reinterpret_cast<const float4*>(address)[1];
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

template <typename T>
__device__ __forceinline__ void store_eight(T* address, const Eight& x) {
    *reinterpret_cast<uint4*>(address) = make_uint4(Pair<T>::pack(x.v[0], x.v[1]), Pair<T>::pack(x.v[2], x.v[3]),
                                                    Pair<T>::pack(x.v[4], x.v[5]), Pair<T>::pack(x.v[6], x.v[7]));
}

template <>
__device__ __forceinline__ void store_eight<__nv_fp8_e4m3>(__nv_fp8_e4m3* address, const Eight& x) {
    const auto pair = [&x](int i) -> uint32_t {
        return __nv_cvt_float2_to_fp8x2(make_float2(x.v[i], x.v[i + 1]), __NV_SATFINITE, __NV_E4M3);
    };
    *reinterpret_cast<uint2*>(address) = make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
}

template <>
__device__ __forceinline__ void store_eight<float>(float* address, const Eight& x) {
    reinterpret_cast<float4*>(address)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    reinterpret_cast<float4*>(address)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

}  // namespace qwenrt::cuda

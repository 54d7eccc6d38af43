// CUDA's device language for g++: what a kernel sees of the emulator.
//
// The kernels' own sources are compiled as C++ with the real CUDA headers for types. This header adds what nvcc would have
// built in: the thread's indices, barriers, warp intrinsics, shared memory. The machine behind it is in machine.cpp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>

namespace simt {

constexpr int kWarp = 32;

struct Indices {
    uint3 thread, block;
    dim3 block_size, grid_size;
};

// The indices of the CUDA thread that is running.
const Indices& indices();

// Runs kernel() once for every thread of every block. cudaErrorLaunchFailure, and simt_error(), where it breaks a rule.
// `function` is the kernel's address, as cudaFuncSetAttribute was told.
cudaError_t launch(const void* function, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   const std::function<void()>& kernel);

// The block's dynamic shared memory, of exactly the size asked for; full of NaN when the block starts.
unsigned char* shared_memory();

bool in_shared_memory(const void* address, size_t bytes);

// What the launches have done since simt_work() was last called.
struct Work {
    int64_t copied = 0;    // bytes that cp.async brought from global memory
    int64_t products = 0;  // mma.sync, each of one warp
    int64_t shared = 0;    // the most dynamic shared memory of a block
};
extern Work work;

void block_barrier();

// What one lane brings to a collective operation of its warp, by lane; null for lanes outside the mask.
using Operands = void* (&)[kWarp];

// Waits until all lanes of mask are in the same operation at the same line, then one of them runs `operation` for all.
// Lanes that are elsewhere break the rule against divergence and end the launch.
void warp_collective(const char* name, int line, unsigned mask, void* operand, void (*operation)(Operands));

// All lanes of mask have passed their writes to each other.
void warp_barrier(int line, unsigned mask);

// Ends the launch with this message.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

template <typename T, typename Choose>
T shuffle(const char* name, int line, unsigned mask, T value, int parameter) {
    struct Lane {
        T in, out;
        int parameter;
    } lane{value, value, parameter};
    warp_collective(name, line, mask, &lane, [](Operands lanes) {
        for (int i = 0; i < kWarp; ++i) {
            if (lanes[i] == nullptr) continue;
            Lane& own = *static_cast<Lane*>(lanes[i]);
            const int from = Choose{}(i, own.parameter);
            if (from < 0 || from >= kWarp) continue;
            if (lanes[from] == nullptr) fail("lane %d shuffles from lane %d, which is not in the mask", i, from);
            own.out = static_cast<Lane*>(lanes[from])->in;
        }
    });
    return lane.out;
}

template <typename T, typename Join>
T reduce(const char* name, int line, unsigned mask, T value) {
    warp_collective(name, line, mask, &value, [](Operands lanes) {
        T* first = nullptr;
        for (void* lane : lanes) {
            if (lane == nullptr) continue;
            if (first == nullptr) first = static_cast<T*>(lane);
            *first = Join{}(*first, *static_cast<T*>(lane));
        }
        for (void* lane : lanes) {
            if (lane != nullptr) *static_cast<T*>(lane) = *first;
        }
    });
    return value;
}

struct FromXor {
    int operator()(int lane, int mask) const { return lane ^ mask; }
};
struct FromBelow {
    int operator()(int lane, int delta) const { return lane - delta; }
};
struct FromLane {
    int operator()(int, int lane) const { return lane % kWarp; }
};
struct Min {
    template <typename T>
    T operator()(T a, T b) const {
        return std::min(a, b);
    }
};
struct Max {
    template <typename T>
    T operator()(T a, T b) const {
        return std::max(a, b);
    }
};

}  // namespace simt

#define __launch_bounds__(...)
#define threadIdx (::simt::indices().thread)
#define blockIdx (::simt::indices().block)
#define blockDim (::simt::indices().block_size)
#define gridDim (::simt::indices().grid_size)

using std::max;
using std::min;

inline void __syncthreads() { simt::block_barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) { simt::warp_barrier(line, mask); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
    return simt::shuffle<T, simt::FromLane>("__shfl_sync", line, mask, value, lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int line = __builtin_LINE()) {
    return simt::shuffle<T, simt::FromXor>("__shfl_xor_sync", line, mask, value, lane_mask);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int delta, int line = __builtin_LINE()) {
    return simt::shuffle<T, simt::FromBelow>("__shfl_up_sync", line, mask, value, delta);
}
inline int __reduce_max_sync(unsigned mask, int value, int line = __builtin_LINE()) {
    return simt::reduce<int, simt::Max>("__reduce_max_sync", line, mask, value);
}
inline int __reduce_min_sync(unsigned mask, int value, int line = __builtin_LINE()) {
    return simt::reduce<int, simt::Min>("__reduce_min_sync", line, mask, value);
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return result;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

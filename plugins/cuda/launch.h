// How a kernel is launched and how it gets its shared memory: the two things whose spelling g++ cannot parse.
#pragma once

#include <cuda_runtime.h>

#ifdef QWENRT_SIMT
#include "simt.h"
#define QWENRT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    ::simt::launch(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, stream, [=] { kernel(__VA_ARGS__); })
#define QWENRT_SHARED_MEMORY(name) unsigned char* const name = ::simt::shared_memory()
#else
#define QWENRT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    (kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__), cudaGetLastError())
#define QWENRT_SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
#endif

#define QWENRT_TRY(call)                                     \
    do {                                                     \
        const cudaError_t status_ = (call);                  \
        if (status_ != cudaSuccess) return status_;          \
    } while (false)

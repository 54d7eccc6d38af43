// The CUDA runtime's names of errors, for a machine that has its headers and no library: the emulator runs no more than the kernels need.
#include <cuda_runtime_api.h>

extern "C" __attribute__((visibility("default"))) const char* cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorInvalidValue ? "cudaErrorInvalidValue" : "another cudaError";
}

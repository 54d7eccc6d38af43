// MixtureOfExperts on CUDA. No framework: device pointers, sizes, a stream.
//
// The op (domain "qwenrt", version 1) is specified in qwenrt/plugins/schema.py; here with 16-bit matrices. All tensors are
// contiguous. Nothing here reads device memory on the host, allocates, or synchronises: grids come from the sizes alone, so
// every launch can be captured in a CUDA graph and replayed with other contents of x and router_logits.
//
//     cudaError_t e = qwenrt_mixture_of_experts(&args);      // args.workspace: qwenrt_mixture_of_experts_workspace_size bytes
#pragma once

#include "types.h"

namespace qwenrt::cuda {

// What is known before any tensor has contents.
struct MixtureOfExpertsShape {
    int32_t num_tokens;      // T: rows of x, padding rows included, which are as good as any other
    int32_t num_experts;     // E, at most 1024
    int32_t top_k;           // experts of a token, at most 32
    int32_t hidden;          // columns of x, a multiple of 8
    int32_t inner;           // columns between an expert's products, a multiple of 8
    int32_t norm_topk_prob;  // 1: the shares of a token's experts add up to 1
    DataType dtype;          // of x, router_logits, gate_up, down and y: kFloat16 or kBFloat16
};

struct MixtureOfExpertsArgs {
    MixtureOfExpertsShape shape;
    const void* x;              // [T, hidden]
    const void* router_logits;  // [T, E]
    const void* gate_up;        // [E * 2 * inner, hidden]: of each expert the gate's rows, then the up's
    const void* down;           // [E * hidden, inner]
    void* y;                    // [T, hidden]
    void* workspace;            // qwenrt_mixture_of_experts_workspace_size bytes, 256-byte aligned; contents need not persist
    size_t workspace_size;
    cudaStream_t stream;
};

}  // namespace qwenrt::cuda

// All pointers must be 16-byte aligned, but for that to router_logits. What qwenrt_mixture_of_experts returns: cudaSuccess;
// cudaErrorInvalidValue where qwenrt_mixture_of_experts_unsupported would say why, a pointer is null or misaligned, or the
// workspace is too small; else what the CUDA call that failed returned. Whatever the tensors hold, nothing else is touched.
extern "C" {

// Null if the kernels can run this shape, else one line that names the field and its limits. There may be no tokens; the
// pointers to what is then empty may be null.
QWENRT_API const char* qwenrt_mixture_of_experts_unsupported(const qwenrt::cuda::MixtureOfExpertsShape* shape);

// Bytes of workspace for this shape on any device: about 2 * T * top_k * (hidden + inner). Never less for a shape with more
// tokens.
QWENRT_API size_t qwenrt_mixture_of_experts_workspace_size(const qwenrt::cuda::MixtureOfExpertsShape* shape);

QWENRT_API cudaError_t qwenrt_mixture_of_experts(const qwenrt::cuda::MixtureOfExpertsArgs* args);

}  // extern "C"

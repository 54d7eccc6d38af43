// PagedAttention on CUDA. No framework: device pointers, sizes, a stream.
//
// The op (domain "qwenrt", version 1) is specified in qwenrt/plugins/schema.py. All tensors are contiguous, so the sizes
// below are the strides. Nothing here reads device memory on the host, allocates, or synchronises: grids come from the
// sizes and from the device's SM count alone, so every launcher can be captured in a CUDA graph and replayed with other
// contents of positions, block_tables, seq_lens and query_start.
//
//     cudaError_t e = qwenrt_paged_attention(&args);      // args.workspace: qwenrt_paged_attention_workspace_size bytes
#pragma once

#include "types.h"

namespace qwenrt::cuda {

// What is known before any tensor has contents: the same for every step with these tensor shapes.
struct PagedAttentionShape {
    int32_t num_tokens;      // T: rows of qkv, padding rows included
    int32_t num_seqs;        // S: rows of block_tables, sequences without rows included
    int32_t max_blocks;      // columns of block_tables
    int32_t num_blocks;      // blocks in the pool
    int32_t max_positions;   // rows of rope
    int32_t num_heads;       // Hq, a multiple of Hkv; Hq / Hkv at most 16
    int32_t num_kv_heads;    // Hkv
    int32_t head_dim;        // D: 64 or 128
    int32_t block_size;      // tokens in a block: 16, 32, 64 or 128
    int32_t sliding_window;  // a token sees itself and the sliding_window - 1 before it; -1: all before it
    float scale;             // of q.k, usually 1 / sqrt(D)
    float norm_eps;          // of the q and k RMSNorm
    DataType dtype;          // of qkv, q_norm, k_norm, attn: kFloat16 or kBFloat16
    DataType kv_dtype;       // of kv_cache: dtype, or kFloat8E4M3
};

struct PagedAttentionArgs {
    PagedAttentionShape shape;
    const void* qkv;              // [T, (Hq + 2*Hkv) * D]
    const void* q_norm;           // [D], or null where the family has no norm (then k_norm is null too)
    const void* k_norm;           // [D], or null
    const float* rope;            // [max_positions, D]: cos in the first D/2 columns, sin in the last
    const int32_t* positions;     // [T]
    const void* kv_cache;         // [num_blocks, 2, Hkv, block_size, D]
    void* kv_cache_out;           // the pool after the write; equal to kv_cache: in place, else the pool is copied first
    const int32_t* block_tables;  // [S, max_blocks]
    const int32_t* seq_lens;      // [S]: context length after this step
    const int32_t* query_start;   // [S+1]: sequence s owns rows query_start[s] to query_start[s+1]
    const float* k_scale;         // [Hkv], kFloat8E4M3 only: stored K times k_scale is K; null: 1
    const float* v_scale;         // [Hkv], likewise for V
    void* attn;                   // [T, Hq*D]; also holds the normalised, rotated q between the kernels
    void* workspace;              // qwenrt_paged_attention_workspace_size bytes, 256-byte aligned; contents need not persist
    size_t workspace_size;
    cudaStream_t stream;
};

}  // namespace qwenrt::cuda

// Pointers to pool, qkv, norms, rope and attn must be 16-byte aligned. What a launcher returns: cudaSuccess;
// cudaErrorInvalidValue where qwenrt_paged_attention_unsupported would say why, a needed pointer is null or misaligned,
// or the workspace is too small; else what the CUDA call that failed returned.
//
// On the device, rows from query_start[S] on are not read and their rows of attn become zeros; of a sequence without rows
// nothing is read or written. A block id outside the pool, or a position outside the rope table or the block table, is the
// caller's mistake: nothing is read or written there, and the sequence's rows of attn have no meaning.

extern "C" {

// Null if the kernels can run this shape, else one line that names the field and its limits. Sizes that vary from step to
// step (T, S, max_blocks, num_blocks) may be 0; the pointers to what is then empty may be null.
QWENRT_API const char* qwenrt_paged_attention_unsupported(const qwenrt::cuda::PagedAttentionShape* shape);

// Bytes of workspace for this shape on any device. Never less for a shape that is larger in T, S or max_blocks, so the
// size for the largest shape serves all.
QWENRT_API size_t qwenrt_paged_attention_workspace_size(const qwenrt::cuda::PagedAttentionShape* shape);

// The whole op: the three launchers below, in order, after copying the pool where kv_cache_out != kv_cache.
QWENRT_API cudaError_t qwenrt_paged_attention(const qwenrt::cuda::PagedAttentionArgs* args);

// RMSNorm and RoPE of q (to attn) and of k, the write of k and v into kv_cache_out, and the plan that the two kernels
// below take their work from (to the workspace).
QWENRT_API cudaError_t qwenrt_rope_cache_write(const qwenrt::cuda::PagedAttentionArgs* args);

// Attention, in place in attn, of the sequences with at most 16 / (Hq / Hkv) rows in this step.
QWENRT_API cudaError_t qwenrt_decode_attention(const qwenrt::cuda::PagedAttentionArgs* args);

// Attention, in place in attn, of the sequences with more rows than that.
QWENRT_API cudaError_t qwenrt_prefill_attention(const qwenrt::cuda::PagedAttentionArgs* args);

}  // extern "C"

// The C API: checks, workspace, and the order of the kernels.
#include <cmath>

#include "kernels.h"
#include "memory.h"

namespace qwenrt::cuda {
namespace {

bool power_of_two(int32_t x) { return x > 0 && (x & (x - 1)) == 0; }

}  // namespace

Workspace Workspace::at(void* memory, int32_t num_seqs, int32_t head_dim) {
    Divider divider(memory);
    const size_t starts = static_cast<size_t>(num_seqs) + 1;
    const size_t rows = 2 * static_cast<size_t>(kMaxDecodeBlocks) * kDecodeRows;
    Workspace w{};
    w.decode_start = divider.take<int32_t>(starts);
    w.prefill_start = divider.take<int32_t>(starts);
    w.partial_max = divider.take<float>(rows);
    w.partial_sum = divider.take<float>(rows);
    w.partial_out = divider.take<float>(rows * static_cast<size_t>(head_dim));
    w.bytes = divider.taken();
    return w;
}

namespace {

const char* unsupported(const PagedAttentionShape& s) {
    if (s.num_tokens < 0 || s.num_seqs < 0 || s.max_blocks < 0 || s.num_blocks < 0 || s.max_positions < 0) {
        return "num_tokens, num_seqs, max_blocks, num_blocks and max_positions must not be negative";
    }
    if (s.num_kv_heads <= 0 || s.num_heads <= 0 || s.num_heads % s.num_kv_heads != 0) {
        return "num_heads must be a positive multiple of num_kv_heads";
    }
    if (s.num_heads / s.num_kv_heads > kMaxGroup) return "num_heads / num_kv_heads must be at most 16";
    if (s.num_kv_heads > 65535) return "num_kv_heads must be at most 65535";
    if (s.head_dim != 64 && s.head_dim != 128) return "head_dim must be 64 or 128";
    if (!power_of_two(s.block_size) || s.block_size < 16 || s.block_size > 128) {
        return "block_size must be 16, 32, 64 or 128";
    }
    if (s.sliding_window < 1 && s.sliding_window != -1) return "sliding_window must be positive, or -1 for none";
    if (!(s.scale > 0.0f) || !std::isfinite(s.scale)) return "scale must be positive and finite";
    if (!(s.norm_eps >= 0.0f)) return "norm_eps must not be negative";
    if (s.dtype != DataType::kFloat16 && s.dtype != DataType::kBFloat16) return "dtype must be float16 or bfloat16";
    if (s.kv_dtype != s.dtype && s.kv_dtype != DataType::kFloat8E4M3) return "kv_dtype must be dtype or float8 e4m3";
    const int64_t slots = static_cast<int64_t>(s.max_blocks) * s.block_size;
    if (slots > INT32_MAX - kTile) return "max_blocks * block_size must be below 2^31";
    if ((slots / kTile + 1) * s.num_seqs > INT32_MAX / s.num_kv_heads) {
        return "num_seqs * max_blocks * block_size * num_kv_heads is too large";
    }
    return nullptr;
}

bool ready(const PagedAttentionArgs& a) {
    const void* const aligned[] = {a.qkv, a.rope, a.attn, a.workspace};
    for (const void* pointer : aligned) {
        if (pointer == nullptr || misaligned(pointer)) return false;
    }
    const bool no_pool = a.kv_cache == nullptr || a.kv_cache_out == nullptr;
    if (misaligned(a.kv_cache) || misaligned(a.kv_cache_out) || (no_pool && a.shape.num_blocks != 0)) return false;
    if (misaligned(a.q_norm) || misaligned(a.k_norm) || (a.q_norm == nullptr) != (a.k_norm == nullptr)) return false;
    const bool scaled = a.k_scale != nullptr || a.v_scale != nullptr;
    if (scaled && a.shape.kv_dtype != DataType::kFloat8E4M3) return false;
    if (a.positions == nullptr || a.query_start == nullptr) return false;
    if (a.shape.num_seqs != 0 && (a.block_tables == nullptr || a.seq_lens == nullptr)) return false;
    return a.workspace_size >= qwenrt_paged_attention_workspace_size(&a.shape);
}

// Checks the arguments and runs `launch` with them, unless there is nothing to do.
template <typename Launch>
cudaError_t checked(const PagedAttentionArgs* args, Launch launch) {
    if (args == nullptr || unsupported(args->shape) != nullptr) return cudaErrorInvalidValue;
    if (args->shape.num_tokens == 0) return cudaSuccess;
    if (!ready(*args)) return cudaErrorInvalidValue;
    Params p{};
    p.args = *args;
    p.workspace = Workspace::at(args->workspace, args->shape.num_seqs, args->shape.head_dim);
    p.group = args->shape.num_heads / args->shape.num_kv_heads;
    while ((1 << p.block_shift) < args->shape.block_size) ++p.block_shift;
    p.head_stride = static_cast<int64_t>(args->shape.block_size) * args->shape.head_dim;
    p.block_stride = 2 * args->shape.num_kv_heads * p.head_stride;
    p.scale_log2 = args->shape.scale * 1.4426950408889634f;
    return launch(p);
}

cudaError_t copy_pool(const PagedAttentionArgs& a) {
    if (a.kv_cache_out == a.kv_cache) return cudaSuccess;
    const PagedAttentionShape& s = a.shape;
    const size_t elements = static_cast<size_t>(s.num_blocks) * 2 * s.num_kv_heads * s.block_size * s.head_dim;
    const size_t size = s.kv_dtype == DataType::kFloat8E4M3 ? 1 : 2;
    return cudaMemcpyAsync(a.kv_cache_out, a.kv_cache, elements * size, cudaMemcpyDeviceToDevice, a.stream);
}

}  // namespace
}  // namespace qwenrt::cuda

using namespace qwenrt::cuda;

const char* qwenrt_paged_attention_unsupported(const PagedAttentionShape* shape) { return unsupported(*shape); }

size_t qwenrt_paged_attention_workspace_size(const PagedAttentionShape* shape) {
    return Workspace::at(nullptr, shape->num_seqs, shape->head_dim).bytes;
}

cudaError_t qwenrt_rope_cache_write(const PagedAttentionArgs* args) { return checked(args, launch_rope_cache); }

cudaError_t qwenrt_decode_attention(const PagedAttentionArgs* args) { return checked(args, launch_decode); }

cudaError_t qwenrt_prefill_attention(const PagedAttentionArgs* args) { return checked(args, launch_prefill); }

cudaError_t qwenrt_paged_attention(const PagedAttentionArgs* args) {
    if (args == nullptr || unsupported(args->shape) != nullptr) return cudaErrorInvalidValue;
    QWENRT_TRY(copy_pool(*args));
    QWENRT_TRY(qwenrt_rope_cache_write(args));
    QWENRT_TRY(qwenrt_decode_attention(args));
    return qwenrt_prefill_attention(args);
}

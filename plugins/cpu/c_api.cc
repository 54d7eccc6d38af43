#include "c_api.h"

#include <cstdio>
#include <exception>

#include "isa.h"
#include "run.h"
#include "thread_pool.h"

namespace {

template <class Run>
int guarded(const Run& run, char* error, size_t error_size) {
  try {
    run();
    return 0;
  } catch (const std::exception& e) {
    if (error != nullptr && error_size > 0) std::snprintf(error, error_size, "%s", e.what());
    return 1;
  }
}

void check_size(const char* name, int64_t size) {
  if (size < 0) throw qwenrt::InvalidArgument(std::string(name) + " is " + std::to_string(size) + ", which is negative");
}

qwenrt::Weight weight_of(const QwenrtWeight& weight) {
  check_size("weight.width", weight.width);
  check_size("weight.depth", weight.depth);
  return {weight.data,  weight.scale, weight.groups,     weight.group_scale, weight.group_offset,
          weight.width, weight.depth, weight.group_size, static_cast<qwenrt::ElementType>(weight.type)};
}

}  // namespace

int qwenrt_paged_attention(const QwenrtPagedAttention* op, int threads, char* error, size_t error_size) {
  const auto run = [&] {
    check_size("num_tokens", op->num_tokens);
    check_size("max_positions", op->max_positions);
    check_size("num_blocks", op->num_blocks);
    check_size("num_seqs", op->num_seqs);
    check_size("max_blocks", op->max_blocks);
    qwenrt::run_paged_attention(
        {op->qkv,          op->q_norm,     op->k_norm,       op->rope,         op->positions,   op->kv_cache,
         op->block_tables, op->seq_lens,   op->query_start,  op->attn,         op->kv_cache_out, op->num_tokens,
         op->max_positions, op->num_blocks, op->num_seqs,    op->max_blocks,   op->num_heads,   op->num_kv_heads,
         op->head_dim,     op->block_size, op->sliding_window, op->scale,      op->norm_eps,
         static_cast<qwenrt::ElementType>(op->kv_type)},
        qwenrt::thread_pool(threads));
  };
  return guarded(run, error, error_size);
}

int qwenrt_linear(const QwenrtLinear* op, int threads, char* error, size_t error_size) {
  const auto run = [&] {
    check_size("rows", op->rows);
    check_size("depth", op->depth);
    qwenrt::run_linear({op->x, weight_of(op->weight), op->bias, op->y, op->rows, op->depth}, qwenrt::thread_pool(threads));
  };
  return guarded(run, error, error_size);
}

int qwenrt_embedding(const QwenrtEmbedding* op, char* error, size_t error_size) {
  const auto run = [&] {
    check_size("rows", op->rows);
    qwenrt::run_embedding({op->ids, weight_of(op->weight), op->y, op->rows, op->depth});
  };
  return guarded(run, error, error_size);
}

int qwenrt_sample_rows(const QwenrtSampleRows* op, int threads, char* error, size_t error_size) {
  const auto run = [&] {
    check_size("rows", op->rows);
    qwenrt::run_sample_rows(*op, qwenrt::thread_pool(threads));
  };
  return guarded(run, error, error_size);
}

int qwenrt_describe_rows(const QwenrtDescribeRows* op, int threads, char* error, size_t error_size) {
  const auto run = [&] {
    check_size("rows", op->rows);
    qwenrt::run_describe_rows(*op, qwenrt::thread_pool(threads));
  };
  return guarded(run, error, error_size);
}

int qwenrt_mixture_of_experts(const QwenrtMixtureOfExperts* op, int threads, char* error, size_t error_size) {
  const auto run = [&] {
    check_size("tokens", op->tokens);
    check_size("hidden", op->hidden);
    check_size("inner", op->inner);
    check_size("num_experts", op->num_experts);
    qwenrt::run_mixture_of_experts({op->x, op->router_logits, weight_of(op->gate_up), weight_of(op->down), op->y, op->tokens,
                                    op->hidden, op->inner, op->num_experts, op->top_k, op->norm_topk_prob != 0},
                                   qwenrt::thread_pool(threads));
  };
  return guarded(run, error, error_size);
}

const char* qwenrt_isa(void) { return qwenrt::isa().name; }

int qwenrt_set_isa(const char* name) { return qwenrt::select_isa(name) ? 0 : 1; }

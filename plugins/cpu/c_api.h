/* The CPU ops for callers without ONNX Runtime (ctypes). Tensors are dense, row-major; index tensors are int32. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* As in ONNX; a uint8 holds two 4-bit codes. */
enum QwenrtElementType { QWENRT_FLOAT32 = 1, QWENRT_UINT8 = 2, QWENRT_INT8 = 3, QWENRT_FLOAT16 = 10, QWENRT_BFLOAT16 = 16 };

/* PagedAttention as qwenrt/plugins/schema.py specifies it. Where kv_cache_out is not kv_cache the pool is copied first. */
struct QwenrtPagedAttention {
  const float* qkv;             /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] */
  const float* q_norm;          /* [head_dim], or null: no norm */
  const float* k_norm;          /* [head_dim], or null: no norm */
  const float* rope;            /* [max_positions, head_dim]: cos, then sin */
  const int32_t* positions;     /* [num_tokens] */
  const void* kv_cache;         /* [num_blocks, 2, num_kv_heads, block_size, head_dim]; int8: head_dim + 4, the last the float32 scale */
  const int32_t* block_tables;  /* [num_seqs, max_blocks] */
  const int32_t* seq_lens;      /* [num_seqs] */
  const int32_t* query_start;   /* [num_seqs + 1] */
  float* attn;                  /* out: [num_tokens, num_heads * head_dim] */
  void* kv_cache_out;           /* out: as kv_cache */
  int64_t num_tokens;
  int64_t max_positions;
  int64_t num_blocks;
  int64_t num_seqs;
  int64_t max_blocks;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim; /* a multiple of 8 */
  int64_t block_size;
  int64_t sliding_window; /* -1: none */
  float scale;
  float norm_eps;
  int32_t kv_type; /* QWENRT_FLOAT32, QWENRT_FLOAT16 or QWENRT_INT8 */
};

/* int8 and uint8 weights lie in panels as qwenrt/plugins/panels.py makes them. */
struct QwenrtWeight {
  const void* data;      /* [width, depth]; int8: [panels, depth / 4, 64]; uint8: [panels, depth / 8, 64] */
  const float* scale;    /* [width], for int8 and uint8 */
  const uint8_t* groups; /* [panels, depth / group_size, 16], for uint8 */
  const float* group_scale;  /* the same shape, or null */
  const float* group_offset; /* the same shape, or null; with group_scale */
  int64_t width;
  int64_t depth; /* of panels: with the columns that fill them up */
  int64_t group_size; /* for uint8, and with group_scale */
  int32_t type; /* any of QwenrtElementType */
};

/* y = x W^T + b. A row of y has the same bits whatever other rows are computed with it. */
struct QwenrtLinear {
  const float* x; /* [rows, depth] */
  struct QwenrtWeight weight;
  const float* bias; /* [width], or null */
  float* y;          /* out: [rows, width] */
  int64_t rows;
  int64_t depth;
};

/* Rows of an int8 or uint8 weight. */
struct QwenrtEmbedding {
  const int32_t* ids; /* [rows] */
  struct QwenrtWeight weight;
  float* y; /* out: [rows, depth] */
  int64_t rows;
  int64_t depth;
};

/* MixtureOfExperts as qwenrt/plugins/schema.py specifies it. */
struct QwenrtMixtureOfExperts {
  const float* x;             /* [tokens, hidden] */
  const float* router_logits; /* [tokens, num_experts] */
  struct QwenrtWeight gate_up; /* [num_experts * 2 * inner, hidden] */
  struct QwenrtWeight down;    /* [num_experts * hidden, inner], of the same type */
  float* y;                    /* out: [tokens, hidden] */
  int64_t tokens;
  int64_t hidden;
  int64_t inner;
  int64_t num_experts;
  int64_t top_k;
  int32_t norm_topk_prob;
};

/* How the token of a row is chosen; the fields but the first are not read where that is 0. */
struct QwenrtSamplingRule {
  float inverse_temperature; /* 0: the largest logit, of equal ones the first */
  float log_min_p;           /* a token stays if (logit - largest) * inverse_temperature is at least this; -infinity: all stay */
  double top_p;              /* of those that stay, the fewest that have this share; 1: all */
  int64_t top_k;             /* the k largest stay, of equal ones the first; 0: all */
};

/* One token for each row of logits, by inverting the weights' running sum, in the order of ids, at the row's uniform number. */
struct QwenrtSampleRows {
  const float* logits;                    /* [rows, vocab] */
  const struct QwenrtSamplingRule* rules; /* [rows] */
  const double* uniforms;                 /* [rows], each at least 0 and below 1 */
  int32_t* tokens;                        /* out: [rows]; -1 where a logit is NaN or the largest is not finite */
  int64_t rows;
  int64_t vocab;
};

/* What the log-probabilities of each row of logits are made of: log-probability = logit - log_sum, in nats. */
struct QwenrtDescribeRows {
  const float* logits; /* [rows, vocab] */
  double* log_sums;    /* out: [rows], log of the sum of e^logit; NaN where a logit is NaN or the largest is not finite */
  int32_t* top;        /* out: [rows, count], ids of the largest logits, the largest first, of equal ones the first; -1 where log_sums is NaN */
  int64_t rows;
  int64_t vocab;
  int64_t count; /* at most vocab */
};

#if defined(__GNUC__)
#define QWENRT_API __attribute__((visibility("default")))
#else
#define QWENRT_API
#endif

/* All return 0, or 1 with a line of text in error[0 : error_size] that names the input and the value; then nothing was
   written. `threads` threads take part, the caller's among them; 0: one per core. */
QWENRT_API int qwenrt_paged_attention(const struct QwenrtPagedAttention* op, int threads, char* error, size_t error_size);
QWENRT_API int qwenrt_linear(const struct QwenrtLinear* op, int threads, char* error, size_t error_size);
QWENRT_API int qwenrt_mixture_of_experts(const struct QwenrtMixtureOfExperts* op, int threads, char* error, size_t error_size);
QWENRT_API int qwenrt_sample_rows(const struct QwenrtSampleRows* op, int threads, char* error, size_t error_size);
QWENRT_API int qwenrt_describe_rows(const struct QwenrtDescribeRows* op, int threads, char* error, size_t error_size);
QWENRT_API int qwenrt_embedding(const struct QwenrtEmbedding* op, char* error, size_t error_size);

/* The instruction set in use: "portable", "avx2", "avx512" or "amx"; the best that the machine has unless set. Setting one that it
   lacks or an unknown name returns 1 and changes nothing; null restores the best. Not while an op runs. */
QWENRT_API const char* qwenrt_isa(void);
QWENRT_API int qwenrt_set_isa(const char* name);

#ifdef __cplusplus
}
#endif

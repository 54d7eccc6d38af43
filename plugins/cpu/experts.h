// A layer's experts: a router picks a few for each token, and each expert's SwiGLU runs over its own tokens alone.
#pragma once

#include <cstdint>

#include "linear.h"

namespace qwenrt {

// Row-major and dense. Experts' matrices lie one below the other; of integers, each fills whole panels.
struct MixtureOfExperts {
  const float* x;       // [tokens, hidden]
  const float* router;  // [tokens, num_experts]: logits
  Weight gate_up;       // [num_experts * 2 * inner, hidden]: of each expert gate, then up
  Weight down;          // [num_experts * hidden, inner]
  float* y;             // [tokens, hidden]
  int64_t tokens;
  int64_t hidden;
  int64_t inner;
  int64_t num_experts;
  int64_t top_k;
  bool norm_topk_prob;
};

}  // namespace qwenrt

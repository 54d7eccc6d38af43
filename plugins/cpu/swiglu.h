// y = silu(gate) * up, the activation between a feed-forward layer's two products.
#pragma once

#include <cstdint>

namespace qwenrt {

struct SwiGlu {
  const float* gate_up;  // [rows, 2 * inner]: gate, then up
  float* y;              // [rows, inner]
  int64_t rows;
  int64_t inner;
};

}  // namespace qwenrt

// y = x W^T + b for the few rows of a decoding step and the many of a prefill, straight from the weights as they lie on disk.
#pragma once

#include <cstdint>

#include "element_type.h"

namespace qwenrt {

// Row-major and dense. Each y[m][n] is summed in one fixed order that depends on `depth` alone, so a row's result has the same
// bits whatever other rows are computed with it.
struct Linear {
  const float* x;      // [rows, depth]
  const void* weight;  // [width, depth], aligned to its element
  const float* bias;   // [width], or null
  float* y;            // [rows, width]
  int64_t rows;
  int64_t depth;
  int64_t width;
  ElementType weight_type;
};

}  // namespace qwenrt

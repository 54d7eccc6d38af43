// Rows of logits to tokens, and what log-probabilities are made of.
#pragma once

#include <cstdint>

#include "c_api.h"

namespace qwenrt {

using SamplingRule = QwenrtSamplingRule;
using SampleRows = QwenrtSampleRows;
using DescribeRows = QwenrtDescribeRows;

// Logits whose peak is taken together are a multiple of this: whole vectors.
constexpr int64_t kPeakUnit = 16;

}  // namespace qwenrt

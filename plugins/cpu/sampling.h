// Rows of logits to tokens.
#pragma once

#include <cstdint>

#include "c_api.h"

namespace qwenrt {

using SamplingRule = QwenrtSamplingRule;
using SampleRows = QwenrtSampleRows;

// Logits whose peak is taken together are a multiple of this: whole vectors.
constexpr int64_t kPeakUnit = 16;

}  // namespace qwenrt

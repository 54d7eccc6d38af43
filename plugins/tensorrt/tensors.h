// The shapes and element types of the node's tensors: what they must be, and what they say of the sizes of a step.
#pragma once

#include <NvInferRuntime.h>

#include <array>
#include <optional>

#include "attributes.h"

namespace qwenrt::tensorrt {

using InputDims = std::array<nvinfer1::Dims, ops::paged_attention::kNumInputs>;

inline constexpr int64_t kUnknown = -1;

// Throws std::invalid_argument naming the input, its shape and what that must be. Dimensions may be kUnknown.
void check_dims(const InputDims& dims, const Attributes& attributes);

// Sets the sizes of `shape` that vary from step to step. Throws std::invalid_argument where one does not fit in 32 bits; an
// unknown one counts as 0.
void set_sizes(cuda::PagedAttentionShape& shape, const InputDims& dims);

// None where the kernels do not know the type at all.
std::optional<cuda::DataType> cuda_type(nvinfer1::DataType type);

// Whether the value at `position`, inputs first and then outputs, may have types[position], given the types before it.
bool supports_type(int32_t position, const nvinfer1::DataType* types, const Attributes& attributes);

}  // namespace qwenrt::tensorrt

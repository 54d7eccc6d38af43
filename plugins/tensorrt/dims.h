// What tensors' shapes are held against, and the types that the kernels know.
#pragma once

#include <NvInferRuntime.h>

#include <optional>
#include <string>
#include <vector>

#include "types.h"

namespace qwenrt::tensorrt {

inline constexpr int64_t kUnknown = -1;

// Dimensions that are not constant become kUnknown.
nvinfer1::Dims known_dims(const nvinfer1::DimsExprs& exprs);

// Dimension `axis`; kUnknown where there is none.
int64_t dimension(const nvinfer1::Dims& dims, int32_t axis);

// Throws std::invalid_argument "`name` has shape [...], must be `meaning`" unless the dimensions are the expected; those that
// are kUnknown on either side may be any.
void expect_dims(const char* name, const nvinfer1::Dims& dims, const std::vector<int64_t>& expected, const std::string& meaning);

// A size that the kernels take: kUnknown counts as 0. Throws std::invalid_argument where it does not fit in 32 bits.
int32_t size_of(int64_t value, const char* what);

// None where the kernels do not know the type at all.
std::optional<cuda::DataType> cuda_type(nvinfer1::DataType type);

}  // namespace qwenrt::tensorrt

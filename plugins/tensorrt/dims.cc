#include "dims.h"

#include <limits>
#include <stdexcept>

namespace qwenrt::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;

std::string text(const Dims& dims) {
    std::string text = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        text += (i == 0 ? "" : ", ") + (dims.d[i] == kUnknown ? "?" : std::to_string(dims.d[i]));
    }
    return text + "]";
}

bool agree(int64_t a, int64_t b) { return a == b || a == kUnknown || b == kUnknown; }

bool matches(const Dims& dims, const std::vector<int64_t>& expected) {
    if (dims.nbDims != static_cast<int32_t>(expected.size())) return false;
    for (size_t i = 0; i < expected.size(); ++i) {
        if (!agree(dims.d[i], expected[i])) return false;
    }
    return true;
}

}  // namespace

Dims known_dims(const nvinfer1::DimsExprs& exprs) {
    Dims dims{};
    dims.nbDims = exprs.nbDims;
    for (int32_t i = 0; i < exprs.nbDims; ++i) dims.d[i] = exprs.d[i]->isConstant() ? exprs.d[i]->getConstantValue() : kUnknown;
    return dims;
}

int64_t dimension(const Dims& dims, int32_t axis) { return axis < dims.nbDims ? dims.d[axis] : kUnknown; }

void expect_dims(const char* name, const Dims& dims, const std::vector<int64_t>& expected, const std::string& meaning) {
    if (!matches(dims, expected)) {
        throw std::invalid_argument(std::string(name) + " has shape " + text(dims) + ", must be " + meaning);
    }
}

int32_t size_of(int64_t value, const char* what) {
    if (value > std::numeric_limits<int32_t>::max()) {
        throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + ", must be below 2^31");
    }
    return value == kUnknown ? 0 : static_cast<int32_t>(value);
}

std::optional<cuda::DataType> cuda_type(DataType type) {
    switch (type) {
        case DataType::kHALF: return cuda::DataType::kFloat16;
        case DataType::kBF16: return cuda::DataType::kBFloat16;
        case DataType::kFP8: return cuda::DataType::kFloat8E4M3;
        default: return std::nullopt;
    }
}

}  // namespace qwenrt::tensorrt

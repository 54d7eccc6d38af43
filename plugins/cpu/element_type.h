// Storage types that arithmetic happens in float for.
#pragma once

#include <cstdint>

namespace qwenrt {

enum class ElementType : int32_t { kFloat32 = 1, kFloat16 = 10, kBFloat16 = 16 };  // as in ONNX

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

}  // namespace qwenrt

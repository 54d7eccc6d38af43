// Storage types that arithmetic happens in float or int32 for.
#pragma once

#include <cstdint>

namespace qwenrt {

// As in ONNX. A uint8 holds two 4-bit codes.
enum class ElementType : int32_t { kFloat32 = 1, kUint8 = 2, kInt8 = 3, kFloat16 = 10, kBFloat16 = 16 };

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

}  // namespace qwenrt

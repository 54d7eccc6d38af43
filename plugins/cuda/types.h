// What the public headers of this folder share.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace qwenrt::cuda {

enum class DataType : int32_t { kFloat16 = 0, kBFloat16 = 1, kFloat8E4M3 = 2 };

}  // namespace qwenrt::cuda

#if defined(__GNUC__)
#define QWENRT_API __attribute__((visibility("default")))
#else
#define QWENRT_API
#endif

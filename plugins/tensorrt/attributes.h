// The node's attributes, from and to TensorRT's plugin fields.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "paged_attention.h"
#include "qwenrt_ops.h"

namespace qwenrt::tensorrt {

// Version of what a plan keeps of the plugin.
inline constexpr int32_t kPlanVersion = ops::kPlanVersion;
inline constexpr char kPlanVersionField[] = "plan_version";

struct Attributes {
    int32_t num_heads = 0;
    int32_t num_kv_heads = 0;
    int32_t head_dim = 0;
    int32_t block_size = 0;
    float scale = 0.0f;
    float norm_eps = 1e-6f;
    int32_t sliding_window = -1;

    // From the attributes of an ONNX node (kBUILD), or from a plan (kRUNTIME), which also has its version. Throws
    // std::invalid_argument naming the field, its value and what is allowed.
    static Attributes from_fields(const nvinfer1::PluginFieldCollection& fields, nvinfer1::TensorRTPhase phase);

    // The attributes' fields, in the order of the schema. They point into *this.
    std::vector<nvinfer1::PluginField> fields() const;

    // "num_heads=16 num_kv_heads=8 ...": the same for equal attributes only.
    std::string text() const;

    // What the kernels want to know, with all sizes of tensors 0.
    cuda::PagedAttentionShape shape(cuda::DataType dtype, cuda::DataType kv_dtype) const;
};

}  // namespace qwenrt::tensorrt

// PagedAttention, for plugin.h.
#pragma once

#include "paged_attention.h"
#include "plugin.h"

namespace qwenrt::tensorrt {

struct PagedAttentionAttributes {
    int32_t num_heads = 0;
    int32_t num_kv_heads = 0;
    int32_t head_dim = 0;
    int32_t block_size = 0;
    float scale = 0.0f;
    float norm_eps = 1e-6f;
    int32_t sliding_window = -1;

    template <typename Self, typename Visit>
    static void for_each(Self& attributes, const Visit& visit) {
        using namespace ops::paged_attention;
        visit(kNumHeadsAttribute, attributes.num_heads, true);
        visit(kNumKvHeadsAttribute, attributes.num_kv_heads, true);
        visit(kHeadDimAttribute, attributes.head_dim, true);
        visit(kBlockSizeAttribute, attributes.block_size, true);
        visit(kScaleAttribute, attributes.scale, true);
        visit(kNormEpsAttribute, attributes.norm_eps, false);
        visit(kSlidingWindowAttribute, attributes.sliding_window, false);
    }

    void check() const;

    // What the kernels want to know, with all sizes of tensors 0.
    cuda::PagedAttentionShape shape(cuda::DataType dtype, cuda::DataType kv_dtype) const;
};

struct PagedAttentionOp {
    static constexpr const char* kName = ops::paged_attention::kName;
    static constexpr int32_t kNumInputs = ops::paged_attention::kNumInputs;
    static constexpr int32_t kNumOutputs = ops::paged_attention::kNumOutputs;
    using Attributes = PagedAttentionAttributes;
    using Shape = cuda::PagedAttentionShape;

    static int32_t aliased_input(int32_t output);
    static void output_types(nvinfer1::DataType* outputs, const nvinfer1::DataType* inputs);
    static bool supports_type(const Attributes& attributes, int32_t position, const nvinfer1::DataType* types);
    static void check_dims(const Attributes& attributes, const InputDims<PagedAttentionOp>& dims);
    static void output_shapes(const Attributes& attributes, const nvinfer1::DimsExprs* inputs, nvinfer1::DimsExprs* outputs,
                              nvinfer1::IExprBuilder& builder);
    static Shape shape(const Attributes& attributes, const InputDims<PagedAttentionOp>& dims,
                       const InputTypes<PagedAttentionOp>& types);
    static size_t workspace_size(const Shape& shape);
    static cudaError_t run(const Step<Shape>& step);
};

}  // namespace qwenrt::tensorrt

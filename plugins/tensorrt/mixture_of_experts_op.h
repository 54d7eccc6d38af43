// MixtureOfExperts with 16-bit matrices, for plugin.h.
#pragma once

#include "mixture_of_experts.h"
#include "plugin.h"

namespace qwenrt::tensorrt {

struct MixtureOfExpertsAttributes {
    int32_t top_k = 0;
    int32_t norm_topk_prob = 0;

    template <typename Self, typename Visit>
    static void for_each(Self& attributes, const Visit& visit) {
        visit(ops::mixture_of_experts::kTopKAttribute, attributes.top_k, true);
        visit(ops::mixture_of_experts::kNormTopkProbAttribute, attributes.norm_topk_prob, true);
    }

    void check() const;
};

struct MixtureOfExpertsOp {
    static constexpr const char* kName = ops::mixture_of_experts::kName;
    static constexpr int32_t kNumInputs = ops::mixture_of_experts::kDown + 1;  // those after it are for integers
    static constexpr int32_t kNumOutputs = ops::mixture_of_experts::kNumOutputs;
    using Attributes = MixtureOfExpertsAttributes;
    using Shape = cuda::MixtureOfExpertsShape;

    static int32_t aliased_input(int32_t) { return -1; }
    static void output_types(nvinfer1::DataType* outputs, const nvinfer1::DataType* inputs);
    static bool supports_type(const Attributes& attributes, int32_t position, const nvinfer1::DataType* types);
    static void check_dims(const Attributes& attributes, const InputDims<MixtureOfExpertsOp>& dims);
    static void output_shapes(const Attributes& attributes, const nvinfer1::DimsExprs* inputs, nvinfer1::DimsExprs* outputs,
                              nvinfer1::IExprBuilder& builder);
    static Shape shape(const Attributes& attributes, const InputDims<MixtureOfExpertsOp>& dims,
                       const InputTypes<MixtureOfExpertsOp>& types);
    static size_t workspace_size(const Shape& shape);
    static cudaError_t run(const Step<Shape>& step);
};

}  // namespace qwenrt::tensorrt

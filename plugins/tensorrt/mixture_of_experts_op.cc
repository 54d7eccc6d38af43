#include "mixture_of_experts_op.h"

namespace qwenrt::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using namespace ops::mixture_of_experts;

// kUnknown, if one of them is.
int64_t product(int64_t a, int64_t b) { return a == kUnknown || b == kUnknown ? kUnknown : a * b; }

}  // namespace

void MixtureOfExpertsAttributes::check() const {
    if (top_k < 1) throw std::invalid_argument("top_k is " + std::to_string(top_k) + ", must be positive");
    if (norm_topk_prob != 0 && norm_topk_prob != 1) {
        throw std::invalid_argument("norm_topk_prob is " + std::to_string(norm_topk_prob) + ", must be 0 or 1");
    }
}

void MixtureOfExpertsOp::output_types(DataType* outputs, const DataType* inputs) { outputs[kY] = inputs[kX]; }

bool MixtureOfExpertsOp::supports_type(const Attributes&, int32_t position, const DataType* types) {
    if (position == kX) return types[kX] == DataType::kHALF || types[kX] == DataType::kBF16;
    return types[position] == types[kX];
}

void MixtureOfExpertsOp::check_dims(const Attributes&, const InputDims<MixtureOfExpertsOp>& dims) {
    const auto expect = [&dims](Input input, const std::vector<int64_t>& expected, const char* meaning) {
        expect_dims(kInputNames[input], dims[input], expected, meaning);
    };
    expect(kX, {kUnknown, kUnknown}, "[T, hidden]");
    expect(kRouterLogits, {dims[kX].d[0], kUnknown}, "[T, num_experts], T as in x");
    expect(kDown, {kUnknown, kUnknown}, "[num_experts * hidden, inner]");
    const int64_t hidden = dims[kX].d[1], num_experts = dims[kRouterLogits].d[1], inner = dims[kDown].d[1];
    expect(kDown, {product(num_experts, hidden), inner}, "[num_experts * hidden, inner], both as in x and router_logits");
    expect(kGateUp, {product(product(num_experts, 2), inner), hidden}, "[num_experts * 2 * inner, hidden], as in the other inputs");
}

void MixtureOfExpertsOp::output_shapes(const Attributes&, const DimsExprs* inputs, DimsExprs* outputs, nvinfer1::IExprBuilder&) {
    outputs[kY] = inputs[kX];
}

MixtureOfExpertsOp::Shape MixtureOfExpertsOp::shape(const Attributes& attributes, const InputDims<MixtureOfExpertsOp>& dims,
                                                    const InputTypes<MixtureOfExpertsOp>& types) {
    const std::optional<cuda::DataType> dtype = cuda_type(types[kX]);
    if (!dtype) throw std::invalid_argument("x must be float16 or bfloat16");
    Shape shape{};
    shape.num_tokens = size_of(dims[kX].d[0], "the number of tokens");
    shape.num_experts = size_of(dims[kRouterLogits].d[1], "the number of experts");
    shape.top_k = attributes.top_k;
    shape.hidden = size_of(dims[kX].d[1], "hidden");
    shape.inner = size_of(dims[kDown].d[1], "inner");
    shape.norm_topk_prob = attributes.norm_topk_prob;
    shape.dtype = *dtype;
    if (const char* const reason = qwenrt_mixture_of_experts_unsupported(&shape)) throw std::invalid_argument(reason);
    return shape;
}

size_t MixtureOfExpertsOp::workspace_size(const Shape& shape) { return qwenrt_mixture_of_experts_workspace_size(&shape); }

cudaError_t MixtureOfExpertsOp::run(const Step<Shape>& step) {
    cuda::MixtureOfExpertsArgs args{};
    args.shape = step.shape;
    args.x = step.inputs[kX];
    args.router_logits = step.inputs[kRouterLogits];
    args.gate_up = step.inputs[kGateUp];
    args.down = step.inputs[kDown];
    args.y = step.outputs[kY];
    args.workspace = step.workspace;
    args.workspace_size = workspace_size(step.shape);
    args.stream = step.stream;
    return qwenrt_mixture_of_experts(&args);
}

}  // namespace qwenrt::tensorrt

// The ops as ONNX Runtime's custom ops: one OrtCustomOp per combination of element types.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ort_context.h"
#include "qwenrt_ops.h"

namespace {

using qwenrt::ElementType;

class PagedAttentionKernel {
 public:
  PagedAttentionKernel(const OrtKernelInfo* info, ElementType kv_type) {
    using namespace qwenrt::ops::paged_attention;
    op_.num_heads = integer_attribute(info, kNumHeadsAttribute);
    op_.num_kv_heads = integer_attribute(info, kNumKvHeadsAttribute);
    op_.head_dim = integer_attribute(info, kHeadDimAttribute);
    op_.block_size = integer_attribute(info, kBlockSizeAttribute);
    op_.scale = float_attribute(info, kScaleAttribute);
    op_.norm_eps = attribute_or(float_attribute, info, kNormEpsAttribute, 1e-6f);
    op_.sliding_window = attribute_or(integer_attribute, info, kSlidingWindowAttribute, int64_t{-1});
    op_.kv_type = kv_type;
    qwenrt::check_attributes(op_);
  }

  void compute(OrtKernelContext* context) const {
    using namespace qwenrt::ops::paged_attention;
    std::vector<Tensor> in;
    for (size_t i = 0; i < kNumInputs; ++i) in.push_back(input(context, i, kInputNames[i]));
    for (const auto& [index, rank] : {std::pair<size_t, size_t>{kQkv, 2}, {kRope, 2}, {kKvCache, 5}, {kBlockTables, 2}, {kSeqLens, 1}})
      in[index].expect_rank(rank);

    qwenrt::PagedAttention op = op_;
    op.num_tokens = in[kQkv].shape[0];
    op.max_positions = in[kRope].shape[0];
    op.num_blocks = in[kKvCache].shape[0];
    op.num_seqs = in[kSeqLens].shape[0];
    op.max_blocks = in[kBlockTables].shape[1];
    in[kQkv].expect_shape({op.num_tokens, (op.num_heads + 2 * op.num_kv_heads) * op.head_dim});
    for (const size_t norm : {kQNorm, kKNorm})
      if (in[norm].shape != std::vector<int64_t>{0}) in[norm].expect_shape({op.head_dim});
    in[kRope].expect_shape({op.max_positions, op.head_dim});
    in[kPositions].expect_shape({op.num_tokens});
    in[kKvCache].expect_shape({op.num_blocks, 2, op.num_kv_heads, op.block_size, op.row_elements()});
    in[kBlockTables].expect_shape({op.num_seqs, op.max_blocks});
    in[kQueryStart].expect_shape({op.num_seqs + 1});

    op.qkv = in[kQkv].as<float>();
    op.q_norm = in[kQNorm].shape[0] == 0 ? nullptr : in[kQNorm].as<float>();
    op.k_norm = in[kKNorm].shape[0] == 0 ? nullptr : in[kKNorm].as<float>();
    op.rope = in[kRope].as<float>();
    op.positions = in[kPositions].as<int32_t>();
    op.kv_cache = in[kKvCache].data;
    op.block_tables = in[kBlockTables].as<int32_t>();
    op.seq_lens = in[kSeqLens].as<int32_t>();
    op.query_start = in[kQueryStart].as<int32_t>();
    op.attn = static_cast<float*>(output(context, kAttn, {op.num_tokens, op.num_heads * op.head_dim}));
    op.kv_cache_out = output(context, kKvCacheOut, in[kKvCache].shape);
    qwenrt::run_paged_attention(op, threads_of(context));
  }

 private:
  qwenrt::PagedAttention op_{};
};

// Where an op has a weight among its inputs, and what belongs to that where it is of integers.
struct WeightInputs {
  const char* const* names;
  size_t weight, scale, groups, group_scale, group_offset;
};

// A weight of Linear, Embedding or MixtureOfExperts; `depth` is what a float weight must have.
qwenrt::Weight weight_of(const OrtKernelContext* context, ElementType type, const WeightInputs& at, int64_t depth) {
  const auto part = [&](size_t index) { return input(context, index, at.names[index]); };
  const Tensor tensor = part(at.weight);
  qwenrt::Weight weight{};
  weight.data = tensor.data;
  weight.type = type;
  if (!weight.is_integer()) {
    tensor.expect_rank(2);
    weight.width = tensor.shape[0], weight.depth = depth;
    tensor.expect_shape({weight.width, depth});
    return weight;
  }
  const Tensor scale = part(at.scale);
  scale.expect_rank(1);
  weight.scale = scale.as<float>(), weight.width = scale.shape[0];
  tensor.expect_rank(3);
  tensor.expect_shape({weight.panels(), tensor.shape[1], qwenrt::kQuadBytes});
  weight.depth = tensor.shape[1] * qwenrt::kQuad * (type == ElementType::kUint8 ? 2 : 1);
  // The first of these says how many groups there are, the others must agree.
  int64_t groups = -1;
  const auto group_part = [&](size_t index) {
    const Tensor values = part(index);
    values.expect_rank(3);
    if (groups < 0) groups = values.shape[1];
    values.expect_shape({weight.panels(), groups, qwenrt::kPanelWidth});
    return values;
  };
  if (type == ElementType::kUint8) weight.groups = group_part(at.groups).as<uint8_t>();
  if (has_input(context, at.group_scale)) weight.group_scale = group_part(at.group_scale).as<float>();
  if (has_input(context, at.group_offset)) weight.group_offset = group_part(at.group_offset).as<float>();
  weight.group_size = groups > 0 && weight.depth % groups == 0 ? weight.depth / groups : 0;
  return weight;
}

class LinearKernel {
 public:
  LinearKernel(const OrtKernelInfo*, ElementType weight_type) : weight_type_(weight_type) {}

  void compute(OrtKernelContext* context) const {
    using namespace qwenrt::ops::linear;
    const Tensor x = input(context, kX, kInputNames[kX]);
    x.expect_rank(2);
    qwenrt::Linear op{};
    op.x = x.as<float>(), op.rows = x.shape[0], op.depth = x.shape[1];
    op.weight = weight_of(context, weight_type_, {kInputNames, kWeight, kScale, kGroups, kGroupScale, kGroupOffset}, op.depth);
    if (has_input(context, kBias)) {
      const Tensor bias = input(context, kBias, kInputNames[kBias]);
      bias.expect_shape({op.weight.width});
      op.bias = bias.as<float>();
    }
    op.y = static_cast<float*>(output(context, kY, {op.rows, op.weight.width}));
    qwenrt::run_linear(op, threads_of(context));
    if (has_input(context, kAdapters)) add_adapters(context, op);
  }

 private:
  static void add_adapters(const OrtKernelContext* context, const qwenrt::Linear& op) {
    using namespace qwenrt::ops::linear;
    const Tensor adapters = input(context, kAdapters, kInputNames[kAdapters]);
    const Tensor a = input(context, kLoraA, kInputNames[kLoraA]), b = input(context, kLoraB, kInputNames[kLoraB]);
    adapters.expect_shape({op.rows});
    a.expect_rank(3);
    const int64_t count = a.shape[0], rank = a.shape[1], width = op.weight.width;
    a.expect_shape({count, rank, op.depth});
    b.expect_shape({count, rank, width});
    qwenrt::run_lora({op.x, adapters.as<int32_t>(), a.as<float>(), b.as<float>(), op.y, op.rows, op.depth, width, rank, count},
                     threads_of(context));
  }

  ElementType weight_type_;
};

class MixtureOfExpertsKernel {
 public:
  MixtureOfExpertsKernel(const OrtKernelInfo* info, ElementType weight_type)
      : top_k_(integer_attribute(info, qwenrt::ops::mixture_of_experts::kTopKAttribute)),
        norm_topk_prob_(integer_attribute(info, qwenrt::ops::mixture_of_experts::kNormTopkProbAttribute) != 0),
        weight_type_(weight_type) {}

  void compute(OrtKernelContext* context) const {
    using namespace qwenrt::ops::mixture_of_experts;
    const Tensor x = input(context, kX, kInputNames[kX]), router = input(context, kRouterLogits, kInputNames[kRouterLogits]);
    x.expect_rank(2);
    router.expect_rank(2);
    const int64_t tokens = x.shape[0], hidden = x.shape[1], experts = router.shape[1];
    router.expect_shape({tokens, experts});
    const WeightInputs gate_ups{kInputNames, kGateUp, kGateUpScale, kGateUpGroups, kGateUpGroupScale, kGateUpGroupOffset};
    const WeightInputs downs{kInputNames, kDown, kDownScale, kDownGroups, kDownGroupScale, kDownGroupOffset};
    const qwenrt::Weight gate_up = weight_of(context, weight_type_, gate_ups, hidden);
    const int64_t pairs = std::max(int64_t{1}, 2 * experts), inner = gate_up.width / pairs;
    expect_width("gate_up", gate_up.width, pairs * inner);
    const qwenrt::Weight down = weight_of(context, weight_type_, downs, inner);
    expect_width("down", down.width, experts * hidden);
    float* y = static_cast<float*>(output(context, kY, {tokens, hidden}));
    qwenrt::run_mixture_of_experts({x.as<float>(), router.as<float>(), gate_up, down, y, tokens, hidden, inner, experts, top_k_,
                                    norm_topk_prob_},
                                   threads_of(context));
  }

 private:
  static void expect_width(const char* name, int64_t rows, int64_t expected) {
    if (rows != expected)
      throw InvalidArgument(std::string(name) + " has " + std::to_string(rows) + " rows, expected " + std::to_string(expected));
  }

  int64_t top_k_;
  bool norm_topk_prob_;
  ElementType weight_type_;
};

class EmbeddingKernel {
 public:
  EmbeddingKernel(const OrtKernelInfo* info, ElementType weight_type)
      : depth_(integer_attribute(info, qwenrt::ops::embedding::kDepthAttribute)), weight_type_(weight_type) {
    if (depth_ < 0) throw InvalidArgument("depth is " + std::to_string(depth_) + ", which is negative");
  }

  void compute(OrtKernelContext* context) const {
    using namespace qwenrt::ops::embedding;
    const Tensor ids = input(context, kIds, kInputNames[kIds]);
    ids.expect_rank(1);
    const qwenrt::Weight weight =
        weight_of(context, weight_type_, {kInputNames, kWeight, kScale, kGroups, kGroupScale, kGroupOffset}, depth_);
    float* y = static_cast<float*>(output(context, kY, {ids.shape[0], depth_}));
    qwenrt::run_embedding({ids.as<int32_t>(), weight, y, ids.shape[0], depth_});
  }

 private:
  int64_t depth_;
  ElementType weight_type_;
};

class SwiGluKernel {
 public:
  SwiGluKernel(const OrtKernelInfo*, ElementType) {}

  void compute(OrtKernelContext* context) const {
    using namespace qwenrt::ops::swi_glu;
    const Tensor gate_up = input(context, kGateUp, kInputNames[kGateUp]);
    gate_up.expect_rank(2);
    const int64_t rows = gate_up.shape[0], inner = gate_up.shape[1] / 2;
    gate_up.expect_shape({rows, 2 * inner});
    float* y = static_cast<float*>(output(context, kY, {rows, inner}));
    qwenrt::run_swiglu({gate_up.as<float>(), y, rows, inner}, threads_of(context));
  }
};

// What ONNX Runtime asks about an op. It passes a pointer to the OrtCustomOp, which is the first part of this.
struct CustomOp : OrtCustomOp {
  using Types = std::vector<ONNXTensorElementDataType>;

  const char* name;
  int op_version;
  Types inputs, outputs;
  size_t required_inputs;
  ElementType type;

  static const CustomOp& of(const OrtCustomOp* op) { return *static_cast<const CustomOp*>(op); }
};

template <class Kernel>
CustomOp custom_op(const char* name, int op_version, CustomOp::Types inputs, size_t required, CustomOp::Types outputs,
                   ElementType type) {
  CustomOp op{};
  op.version = kApiVersion;
  op.name = name;
  op.op_version = op_version;
  op.inputs = std::move(inputs);
  op.outputs = std::move(outputs);
  op.required_inputs = required;
  op.type = type;
  op.GetName = [](const OrtCustomOp* self) { return CustomOp::of(self).name; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp* self) { return CustomOp::of(self).inputs.size(); };
  op.GetOutputTypeCount = [](const OrtCustomOp* self) { return CustomOp::of(self).outputs.size(); };
  op.GetInputType = [](const OrtCustomOp* self, size_t i) { return CustomOp::of(self).inputs[i]; };
  op.GetOutputType = [](const OrtCustomOp* self, size_t i) { return CustomOp::of(self).outputs[i]; };
  op.GetInputCharacteristic = [](const OrtCustomOp* self, size_t i) {
    return i < CustomOp::of(self).required_inputs ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetStartVersion = op.GetEndVersion = [](const OrtCustomOp* self) { return CustomOp::of(self).op_version; };
  op.CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
    return guarded([&] { *kernel = new Kernel(info, CustomOp::of(self).type); });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    return guarded([&] { static_cast<const Kernel*>(kernel)->compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

std::vector<CustomOp> make_ops() {
  constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, kInt = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
                 kByte = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  std::vector<CustomOp> ops;
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kInt8}) {
    using namespace qwenrt::ops::paged_attention;
    const auto kv = static_cast<ONNXTensorElementDataType>(type);
    ops.push_back(custom_op<PagedAttentionKernel>(kName, kVersion, {kFloat, kFloat, kFloat, kFloat, kInt, kv, kInt, kInt, kInt},
                                                  kNumInputs, {kFloat, kv}, type));
  }
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16, ElementType::kInt8, ElementType::kUint8}) {
    using namespace qwenrt::ops::linear;
    const auto weight = static_cast<ONNXTensorElementDataType>(type);
    ops.push_back(custom_op<LinearKernel>(kName, kVersion, 
                                          {kFloat, weight, kFloat, kFloat, kByte, kInt, kFloat, kFloat, kFloat, kFloat}, kBias,
                                          {kFloat}, type));
  }
  for (const ElementType type : {ElementType::kInt8, ElementType::kUint8}) {
    using namespace qwenrt::ops::embedding;
    const auto weight = static_cast<ONNXTensorElementDataType>(type);
    ops.push_back(custom_op<EmbeddingKernel>(kName, kVersion, {kInt, weight, kFloat, kByte, kFloat, kFloat}, kScale, {kFloat}, type));
  }
  for (const ElementType type : {ElementType::kFloat32, ElementType::kFloat16, ElementType::kBFloat16, ElementType::kInt8, ElementType::kUint8}) {
    using namespace qwenrt::ops::mixture_of_experts;
    const auto weight = static_cast<ONNXTensorElementDataType>(type);
    ops.push_back(custom_op<MixtureOfExpertsKernel>(kName, kVersion, 
                                                    {kFloat, kFloat, weight, weight, kFloat, kFloat, kByte, kByte, kFloat, kFloat,
                                                     kFloat, kFloat},
                                                    kGateUpScale, {kFloat}, type));
  }
  {
    using namespace qwenrt::ops::swi_glu;
    ops.push_back(custom_op<SwiGluKernel>(kName, kVersion, {kFloat}, kNumInputs, {kFloat}, ElementType::kFloat32));
  }
  return ops;
}

void register_ops(OrtSessionOptions* options) {
  // ONNX Runtime keeps pointers to both, for as long as any session lives.
  static const std::vector<CustomOp> ops = make_ops();
  static OrtCustomOpDomain* const domain = [] {
    OrtCustomOpDomain* created = nullptr;
    check(api->CreateCustomOpDomain(qwenrt::ops::kDomain, &created));
    for (const CustomOp& op : ops) check(api->CustomOpDomain_Add(created, &op));
    return created;
  }();
  check(api->AddCustomOpDomain(options, domain));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                                             const OrtApiBase* base) {
  api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    // Version 1 has all that is needed to say so.
    const std::string message = std::string("qwenrt's ops need ONNX Runtime 1.17 or later, this is ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, message.c_str());
  }
  return guarded([&] { register_ops(options); });
}

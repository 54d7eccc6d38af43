#include "plugin.h"

#include <atomic>
#include <stdexcept>

#include "log.h"
#include "tensors.h"

namespace qwenrt::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
using namespace ops::paged_attention;

constexpr int32_t kFailure = -1;

void check_counts(int32_t num_inputs, int32_t num_outputs) {
    if (num_inputs != kNumInputs || num_outputs != kNumOutputs) {
        throw std::invalid_argument("the node has " + std::to_string(num_inputs) + " inputs and " + std::to_string(num_outputs) +
                                    " outputs, must have " + std::to_string(kNumInputs) + " and " + std::to_string(kNumOutputs));
    }
}

template <typename Of>
InputDims input_dims(const Of& of) {
    InputDims dims{};
    for (int32_t i = 0; i < kNumInputs; ++i) dims[i] = of(i);
    return dims;
}

Dims known(const DimsExprs& exprs) {
    Dims dims{};
    dims.nbDims = exprs.nbDims;
    for (int32_t i = 0; i < exprs.nbDims; ++i) dims.d[i] = exprs.d[i]->isConstant() ? exprs.d[i]->getConstantValue() : kUnknown;
    return dims;
}

// The shape of the largest step or of one step. Throws where the kernels cannot run it.
cuda::PagedAttentionShape step_shape(const Attributes& attributes, const InputDims& dims, DataType qkv, DataType kv_cache) {
    const std::optional<cuda::DataType> dtype = cuda_type(qkv), kv_dtype = cuda_type(kv_cache);
    if (!dtype || !kv_dtype) throw std::invalid_argument("qkv must be float16 or bfloat16, kv_cache of the same type");
    cuda::PagedAttentionShape shape = attributes.shape(*dtype, *kv_dtype);
    set_sizes(shape, dims);
    if (const char* const reason = qwenrt_paged_attention_unsupported(&shape)) throw std::invalid_argument(reason);
    return shape;
}

cuda::PagedAttentionShape step_shape(const Attributes& attributes, const PluginTensorDesc* inputs) {
    const InputDims dims = input_dims([inputs](int32_t i) { return inputs[i].dims; });
    return step_shape(attributes, dims, inputs[kQkv].type, inputs[kKvCache].type);
}

void warn_of_copy() {
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
        log(Severity::kWARNING, "kv_cache_out is not bound to the memory of kv_cache, so every step copies the whole pool; build "
                                "with PreviewFeature::kALIASED_PLUGIN_IO_10_03 and bind one buffer to both");
    }
}

}  // namespace

PagedAttentionPlugin::PagedAttentionPlugin(const Attributes& attributes)
    : attributes_(attributes), text_(attributes.text()), fields_(attributes_.fields()) {
    fields_.emplace_back(kPlanVersionField, &plan_version_, nvinfer1::PluginFieldType::kINT32, 1);
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginCapability* PagedAttentionPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* PagedAttentionPlugin::clone() noexcept {
    return guarded<IPluginV3*>(nullptr, [this] { return new PagedAttentionPlugin(*this); });
}

nvinfer1::IPluginV3* PagedAttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

int32_t PagedAttentionPlugin::getAliasedInput(int32_t output) noexcept { return output == kKvCacheOut ? kKvCache : -1; }

int32_t PagedAttentionPlugin::getOutputDataTypes(DataType* outputs, int32_t num_outputs, const DataType* inputs,
                                                 int32_t num_inputs) const noexcept {
    return guarded(kFailure, [&] {
        check_counts(num_inputs, num_outputs);
        outputs[kAttn] = inputs[kQkv];
        outputs[kKvCacheOut] = inputs[kKvCache];
        return 0;
    });
}

int32_t PagedAttentionPlugin::getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t,
                                              DimsExprs* outputs, int32_t num_outputs,
                                              nvinfer1::IExprBuilder& builder) noexcept {
    return guarded(kFailure, [&] {
        check_counts(num_inputs, num_outputs);
        check_dims(input_dims([inputs](int32_t i) { return known(inputs[i]); }), attributes_);
        outputs[kAttn].nbDims = 2;
        outputs[kAttn].d[0] = inputs[kQkv].d[0];
        outputs[kAttn].d[1] = builder.constant(static_cast<int64_t>(attributes_.num_heads) * attributes_.head_dim);
        outputs[kKvCacheOut] = inputs[kKvCache];
        return 0;
    });
}

bool PagedAttentionPlugin::supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* values, int32_t num_inputs,
                                                     int32_t num_outputs) noexcept {
    return guarded(false, [&] {
        check_counts(num_inputs, num_outputs);
        if (values[position].desc.format != TensorFormat::kLINEAR) return false;
        std::array<DataType, kNumInputs + kNumOutputs> types{};
        for (int32_t i = 0; i <= position; ++i) types[i] = values[i].desc.type;
        return supports_type(position, types.data(), attributes_);
    });
}

int32_t PagedAttentionPlugin::configurePlugin(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                              const DynamicPluginTensorDesc*, int32_t num_outputs) noexcept {
    return guarded(kFailure, [&] {
        check_counts(num_inputs, num_outputs);
        const InputDims largest = input_dims([inputs](int32_t i) { return inputs[i].max; });
        check_dims(input_dims([inputs](int32_t i) { return inputs[i].desc.dims; }), attributes_);
        check_dims(largest, attributes_);
        step_shape(attributes_, largest, inputs[kQkv].desc.type, inputs[kKvCache].desc.type);
        return 0;
    });
}

size_t PagedAttentionPlugin::getWorkspaceSize(const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                              const DynamicPluginTensorDesc*, int32_t num_outputs) const noexcept {
    return guarded(size_t{0}, [&] {
        check_counts(num_inputs, num_outputs);
        const InputDims largest = input_dims([inputs](int32_t i) { return inputs[i].max; });
        check_dims(largest, attributes_);
        const cuda::PagedAttentionShape shape =
            step_shape(attributes_, largest, inputs[kQkv].desc.type, inputs[kKvCache].desc.type);
        return qwenrt_paged_attention_workspace_size(&shape);
    });
}

int32_t PagedAttentionPlugin::onShapeChange(const PluginTensorDesc* inputs, int32_t num_inputs, const PluginTensorDesc*,
                                            int32_t num_outputs) noexcept {
    return guarded(kFailure, [&] {
        check_counts(num_inputs, num_outputs);
        check_dims(input_dims([inputs](int32_t i) { return inputs[i].dims; }), attributes_);
        step_shape(attributes_, inputs);
        return 0;
    });
}

int32_t PagedAttentionPlugin::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc*, const void* const* inputs,
                                      void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return guarded(kFailure, [&] {
        cuda::PagedAttentionArgs args{};
        args.shape = step_shape(attributes_, input_descs);
        const bool norm = input_descs[kQNorm].dims.d[0] != 0;
        args.qkv = inputs[kQkv];
        args.q_norm = norm ? inputs[kQNorm] : nullptr;
        args.k_norm = norm ? inputs[kKNorm] : nullptr;
        args.rope = static_cast<const float*>(inputs[kRope]);
        args.positions = static_cast<const int32_t*>(inputs[kPositions]);
        args.kv_cache = inputs[kKvCache];
        args.kv_cache_out = outputs[kKvCacheOut];
        args.block_tables = static_cast<const int32_t*>(inputs[kBlockTables]);
        args.seq_lens = static_cast<const int32_t*>(inputs[kSeqLens]);
        args.query_start = static_cast<const int32_t*>(inputs[kQueryStart]);
        args.attn = outputs[kAttn];
        args.workspace = workspace;
        args.workspace_size = qwenrt_paged_attention_workspace_size(&args.shape);
        args.stream = stream;
        if (args.kv_cache != args.kv_cache_out) warn_of_copy();
        const cudaError_t status = qwenrt_paged_attention(&args);
        if (status == cudaSuccess) return 0;
        throw std::runtime_error(std::string("the kernels could not be launched: ") + cudaGetErrorName(status));
    });
}

}  // namespace qwenrt::tensorrt

// An op as a TensorRT plugin (IPluginV3): what all ops have in common, around what an op says of itself. All computing is in ../cuda.
//
// An Op has a kName, kNumInputs and kNumOutputs, a struct of Attributes (fields.h), and these static functions, which throw
// std::exception where something is wrong:
//
//     int32_t aliased_input(int32_t output)                           the input whose memory an output has; -1: none
//     void output_types(DataType* outputs, const DataType* inputs)
//     bool supports_type(const Attributes&, int32_t position, const DataType* types)   inputs, then outputs; given those before it
//     void check_dims(const Attributes&, const InputDims<Op>&)        dimensions may be kUnknown
//     void output_shapes(const Attributes&, const DimsExprs* inputs, DimsExprs* outputs, IExprBuilder&)
//     Shape shape(const Attributes&, const InputDims<Op>&, const InputTypes<Op>&)      of a step that the kernels can run
//     size_t workspace_size(const Shape&)
//     cudaError_t run(const Step&)
//
// A plugin object keeps its attributes and nothing else, so it may be used from any thread, and any context may share it.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "dims.h"
#include "fields.h"
#include "log.h"

namespace qwenrt::tensorrt {

// The ONNX parser looks for the node's op in the default namespace, whatever the node's domain.
inline constexpr char kNamespace[] = "";
inline constexpr char kVersion[] = "1";

template <typename Op>
using InputDims = std::array<nvinfer1::Dims, Op::kNumInputs>;

template <typename Op>
using InputTypes = std::array<nvinfer1::DataType, Op::kNumInputs>;

// What a step is run with: its shape, and memory by the numbers of inputs and outputs.
template <typename Shape>
struct Step {
    Shape shape;
    const nvinfer1::PluginTensorDesc* descs;  // of the inputs
    const void* const* inputs;
    void* const* outputs;
    void* workspace;
    cudaStream_t stream;
};

template <typename Op>
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuildV2,
                     public nvinfer1::IPluginV3OneRuntime {
public:
    using Attributes = typename Op::Attributes;

    explicit Plugin(const Attributes& attributes)
        : attributes_(attributes), text_(text_of(attributes_)), fields_(fields_of(attributes_)) {
        fields_.emplace_back(kPlanVersionField, &plan_version_, nvinfer1::PluginFieldType::kINT32, 1);
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }
    Plugin(const Plugin& other) : Plugin(other.attributes_) {}
    Plugin& operator=(const Plugin&) = delete;

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override {
        switch (type) {
            case nvinfer1::PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
            case nvinfer1::PluginCapabilityType::kBUILD: return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
            case nvinfer1::PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    nvinfer1::IPluginV3* clone() noexcept override {
        return guarded<IPluginV3*>(Op::kName, nullptr, [this] { return new Plugin(*this); });
    }
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override { return clone(); }

    const char* getPluginName() const noexcept override { return Op::kName; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }
    const char* getTimingCacheID() noexcept override { return text_.c_str(); }
    const char* getMetadataString() noexcept override { return text_.c_str(); }
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

    int32_t getNbOutputs() const noexcept override { return Op::kNumOutputs; }
    int32_t getAliasedInput(int32_t output) noexcept override { return Op::aliased_input(output); }

    int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t num_outputs, const nvinfer1::DataType* inputs,
                               int32_t num_inputs) const noexcept override {
        return checked(num_inputs, num_outputs, [&] { Op::output_types(outputs, inputs); });
    }

    int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs*, int32_t,
                            nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                            nvinfer1::IExprBuilder& builder) noexcept override {
        return checked(num_inputs, num_outputs, [&] {
            Op::check_dims(attributes_, gather<nvinfer1::Dims>([inputs](int32_t i) { return known_dims(inputs[i]); }));
            Op::output_shapes(attributes_, inputs, outputs, builder);
        });
    }

    bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* values, int32_t num_inputs,
                                   int32_t num_outputs) noexcept override {
        bool supported = false;
        checked(num_inputs, num_outputs, [&] {
            if (values[position].desc.format != nvinfer1::TensorFormat::kLINEAR) return;
            std::array<nvinfer1::DataType, Op::kNumInputs + Op::kNumOutputs> types{};
            for (int32_t i = 0; i <= position; ++i) types[i] = values[i].desc.type;
            supported = Op::supports_type(attributes_, position, types.data());
        });
        return supported;
    }

    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                            const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) noexcept override {
        return checked(num_inputs, num_outputs, [&] {
            Op::check_dims(attributes_, gather<nvinfer1::Dims>([inputs](int32_t i) { return inputs[i].desc.dims; }));
            largest(inputs);
        });
    }

    size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                            const nvinfer1::DynamicPluginTensorDesc*, int32_t num_outputs) const noexcept override {
        size_t size = 0;
        checked(num_inputs, num_outputs, [&] { size = Op::workspace_size(largest(inputs)); });
        return size;
    }

    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs, const nvinfer1::PluginTensorDesc*,
                          int32_t num_outputs) noexcept override {
        return checked(num_inputs, num_outputs, [&] {
            Op::check_dims(attributes_, gather<nvinfer1::Dims>([inputs](int32_t i) { return inputs[i].dims; }));
            actual(inputs);
        });
    }

    int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*, const void* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
        return guarded(Op::kName, kFailure, [&] {
            const typename Op::Shape shape = actual(input_descs);
            const cudaError_t status = Op::run({shape, input_descs, inputs, outputs, workspace, stream});
            if (status == cudaSuccess) return 0;
            throw std::runtime_error(std::string("the kernels could not be launched: ") + cudaGetErrorName(status));
        });
    }

private:
    static constexpr int32_t kFailure = -1;

    template <typename Body>
    static int32_t checked(int32_t num_inputs, int32_t num_outputs, const Body& body) noexcept {
        return guarded(Op::kName, kFailure, [&] {
            if (num_inputs != Op::kNumInputs || num_outputs != Op::kNumOutputs) {
                throw std::invalid_argument("the node has " + std::to_string(num_inputs) + " inputs and " +
                                            std::to_string(num_outputs) + " outputs, must have " +
                                            std::to_string(Op::kNumInputs) + " and " + std::to_string(Op::kNumOutputs));
            }
            body();
            return 0;
        });
    }

    template <typename Value, typename Of>
    static std::array<Value, Op::kNumInputs> gather(const Of& of) {
        std::array<Value, Op::kNumInputs> values{};
        for (int32_t i = 0; i < Op::kNumInputs; ++i) values[i] = of(i);
        return values;
    }

    // The shape of the largest step.
    typename Op::Shape largest(const nvinfer1::DynamicPluginTensorDesc* inputs) const {
        const InputDims<Op> dims = gather<nvinfer1::Dims>([inputs](int32_t i) { return inputs[i].max; });
        Op::check_dims(attributes_, dims);
        return Op::shape(attributes_, dims, gather<nvinfer1::DataType>([inputs](int32_t i) { return inputs[i].desc.type; }));
    }

    // The shape of a step.
    typename Op::Shape actual(const nvinfer1::PluginTensorDesc* inputs) const {
        return Op::shape(attributes_, gather<nvinfer1::Dims>([inputs](int32_t i) { return inputs[i].dims; }),
                         gather<nvinfer1::DataType>([inputs](int32_t i) { return inputs[i].type; }));
    }

    const Attributes attributes_;
    const std::string text_;
    const int32_t plan_version_ = kPlanVersion;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_;
};

}  // namespace qwenrt::tensorrt

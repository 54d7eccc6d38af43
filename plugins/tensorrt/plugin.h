// PagedAttention as a TensorRT plugin (IPluginV3): shapes, types and memory here, all computing in ../cuda.
//
// A plugin object keeps its attributes and nothing else, so it may be used from any thread, and any context may share it.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "attributes.h"

namespace qwenrt::tensorrt {

// The ONNX parser looks for the node's op in the default namespace, whatever the node's domain.
inline constexpr char kNamespace[] = "";
inline constexpr char kVersion[] = "1";

class PagedAttentionPlugin final : public nvinfer1::IPluginV3,
                                   public nvinfer1::IPluginV3OneCore,
                                   public nvinfer1::IPluginV3OneBuildV2,
                                   public nvinfer1::IPluginV3OneRuntime {
public:
    explicit PagedAttentionPlugin(const Attributes& attributes);
    PagedAttentionPlugin(const PagedAttentionPlugin& other) : PagedAttentionPlugin(other.attributes_) {}
    PagedAttentionPlugin& operator=(const PagedAttentionPlugin&) = delete;

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    const char* getPluginName() const noexcept override { return ops::paged_attention::kName; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

    int32_t getNbOutputs() const noexcept override { return ops::paged_attention::kNumOutputs; }
    int32_t getAliasedInput(int32_t output) noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t num_outputs, const nvinfer1::DataType* inputs,
                               int32_t num_inputs) const noexcept override;
    int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t num_inputs, const nvinfer1::DimsExprs* shape_inputs,
                            int32_t num_shape_inputs, nvinfer1::DimsExprs* outputs, int32_t num_outputs,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* values, int32_t num_inputs,
                                   int32_t num_outputs) noexcept override;
    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                            const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
    size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                            const nvinfer1::DynamicPluginTensorDesc* outputs, int32_t num_outputs) const noexcept override;
    const char* getTimingCacheID() noexcept override { return text_.c_str(); }
    const char* getMetadataString() noexcept override { return text_.c_str(); }

    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t num_inputs,
                          const nvinfer1::PluginTensorDesc* outputs, int32_t num_outputs) noexcept override;
    int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc* output_descs,
                    const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override { return &collection_; }

private:
    const Attributes attributes_;
    const std::string text_;
    const int32_t plan_version_ = kPlanVersion;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_;
};

}  // namespace qwenrt::tensorrt

// Makes PagedAttention plugins from the attributes of an ONNX node or from a plan.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

namespace qwenrt::tensorrt {

class PagedAttentionCreator final : public nvinfer1::IPluginCreatorV3One {
public:
    PagedAttentionCreator();

    nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
    const char* getPluginName() const noexcept override;
    const char* getPluginVersion() const noexcept override;
    const char* getPluginNamespace() const noexcept override;

private:
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_;
};

}  // namespace qwenrt::tensorrt

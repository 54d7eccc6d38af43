// Makes plugins of an op from the attributes of an ONNX node or from a plan.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

#include "plugin.h"

namespace qwenrt::tensorrt {

template <typename Op>
class Creator final : public nvinfer1::IPluginCreatorV3One {
public:
    Creator() : fields_(fields_of(typename Op::Attributes{})) {
        for (nvinfer1::PluginField& field : fields_) field.data = nullptr;
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }

    nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override {
        return guarded<nvinfer1::IPluginV3*>(Op::kName, nullptr, [&]() -> nvinfer1::IPluginV3* {
            try {
                if (fields == nullptr) throw std::invalid_argument("there are no attributes");
                return new Plugin<Op>(attributes_from<typename Op::Attributes>(*fields, phase));
            } catch (const std::invalid_argument& error) {
                throw std::invalid_argument("node \"" + std::string(name == nullptr ? "" : name) + "\": " + error.what());
            }
        });
    }

    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
    const char* getPluginName() const noexcept override { return Op::kName; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

private:
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_;
};

}  // namespace qwenrt::tensorrt

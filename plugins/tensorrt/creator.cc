#include "creator.h"

#include <stdexcept>

#include "log.h"
#include "plugin.h"

namespace qwenrt::tensorrt {

PagedAttentionCreator::PagedAttentionCreator() : fields_(Attributes{}.fields()) {
    for (nvinfer1::PluginField& field : fields_) field.data = nullptr;
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginV3* PagedAttentionCreator::createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                                         nvinfer1::TensorRTPhase phase) noexcept {
    return guarded<nvinfer1::IPluginV3*>(nullptr, [&]() -> nvinfer1::IPluginV3* {
        try {
            if (fields == nullptr) throw std::invalid_argument("there are no attributes");
            return new PagedAttentionPlugin(Attributes::from_fields(*fields, phase));
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument("node \"" + std::string(name == nullptr ? "" : name) + "\": " + error.what());
        }
    });
}

const char* PagedAttentionCreator::getPluginName() const noexcept { return ops::paged_attention::kName; }
const char* PagedAttentionCreator::getPluginVersion() const noexcept { return kVersion; }
const char* PagedAttentionCreator::getPluginNamespace() const noexcept { return kNamespace; }

}  // namespace qwenrt::tensorrt

// What TensorRT calls in this library, and what happens when the library is merely loaded.
#include <array>
#include <vector>

#include "creator.h"
#include "host_library.h"
#include "log.h"
#include "mixture_of_experts_op.h"
#include "paged_attention_op.h"

#define QWENRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace qwenrt::tensorrt {
namespace {

const std::array<nvinfer1::IPluginCreatorInterface*, 2>& creators() {
    static Creator<PagedAttentionOp> paged_attention;
    static Creator<MixtureOfExpertsOp> mixture_of_experts;
    static const std::array<nvinfer1::IPluginCreatorInterface*, 2> all{&paged_attention, &mixture_of_experts};
    return all;
}

// Those that are in a registry because this library put them there.
std::vector<nvinfer1::IPluginCreatorInterface*>& registered_on_load() {
    static std::vector<nvinfer1::IPluginCreatorInterface*> registered;
    return registered;
}

// For a host that only loads the library (polygraphy --plugins), and does so after TensorRT.
__attribute__((constructor)) void register_on_load() {
    for (nvinfer1::IPluginCreatorInterface* const creator : creators()) {
        if (register_creator(*creator)) registered_on_load().push_back(creator);
    }
}

}  // namespace
}  // namespace qwenrt::tensorrt

QWENRT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { qwenrt::tensorrt::set_logger_finder(finder); }

// TensorRT registers what this returns, and takes them out again when it unloads the library: they must not be there already.
QWENRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    using namespace qwenrt::tensorrt;
    for (nvinfer1::IPluginCreatorInterface* const creator : registered_on_load()) deregister_creator(*creator);
    registered_on_load().clear();
    count = static_cast<int32_t>(creators().size());
    return creators().data();
}

// What TensorRT calls in this library, and what happens when the library is merely loaded.
#include "creator.h"
#include "host_library.h"
#include "log.h"

#define QWENRT_EXPORT extern "C" __attribute__((visibility("default")))

namespace qwenrt::tensorrt {
namespace {

PagedAttentionCreator& creator() {
    static PagedAttentionCreator creator;
    return creator;
}

// The creator is in a registry because this library put it there.
bool registered_on_load = false;

// For a host that only loads the library (polygraphy --plugins), and does so after TensorRT.
__attribute__((constructor)) void register_on_load() { registered_on_load = register_creator(creator()); }

}  // namespace
}  // namespace qwenrt::tensorrt

QWENRT_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) { qwenrt::tensorrt::set_logger_finder(finder); }

// TensorRT registers what this returns, and takes it out again when it unloads the library: it must not be there already.
QWENRT_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    using namespace qwenrt::tensorrt;
    if (registered_on_load) deregister_creator(creator());
    registered_on_load = false;
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&creator()};
    count = 1;
    return creators;
}

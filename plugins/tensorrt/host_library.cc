#include "host_library.h"

#include <dlfcn.h>

namespace qwenrt::tensorrt {
namespace {

constexpr const char* kFiles[] = {"libnvinfer.so.10", "libnvinfer.so.11", "libtensorrt_rtx.so.1"};

// The TensorRT in this process, not loaded by this; null if there is none. Python loads it privately, so its functions are not
// among the global names: it is found by the name of its file. dlclose gives the handle back, the library stays.
void* open_host() noexcept {
    if (dlsym(RTLD_DEFAULT, "getPluginRegistry") != nullptr) return dlopen(nullptr, RTLD_LAZY);
    for (const char* file : kFiles) {
        if (void* const library = dlopen(file, RTLD_NOLOAD | RTLD_LAZY)) return library;
    }
    return nullptr;
}

// What the function of the TensorRT in this process returns; `none` if there is no TensorRT.
template <typename Result>
Result call_host(const char* name, Result none) noexcept {
    void* const host = open_host();
    if (host == nullptr) return none;
    auto* const function = reinterpret_cast<Result (*)() noexcept>(dlsym(host, name));
    const Result result = function == nullptr ? none : function();
    dlclose(host);
    return result;
}

// Null if the version is not known. TensorRT for RTX counts from 1; its 1.7 has what TensorRT 11 has.
const Slots* find_slots() noexcept {
    const int32_t major = call_host<int32_t>("getInferLibMajorVersion", 0);
    if (major == 10) return &kSlots10;
    const bool rtx = major == 1 && call_host<int32_t>("getInferLibMinorVersion", 0) >= 7;
    return major == 11 || rtx ? &kSlots11 : nullptr;
}

template <typename Result, typename... Arguments>
Result call_virtual(void* object, int32_t slot, Arguments... arguments) noexcept {
    void* const* const functions = *static_cast<void* const* const*>(object);
    return reinterpret_cast<Result (*)(void*, Arguments...) noexcept>(functions[slot])(object, arguments...);
}

void* find_registry() noexcept { return call_host<void*>("getPluginRegistry", nullptr); }

}  // namespace

bool register_creator(nvinfer1::IPluginCreatorInterface& creator) noexcept {
    const Slots* const slots = find_slots();
    void* const registry = find_registry();
    return slots != nullptr && registry != nullptr && call_virtual<bool>(registry, slots->register_creator, &creator, "");
}

void deregister_creator(const nvinfer1::IPluginCreatorInterface& creator) noexcept {
    const Slots* const slots = find_slots();
    void* const registry = find_registry();
    if (slots != nullptr && registry != nullptr) call_virtual<bool>(registry, slots->deregister_creator, &creator);
}

bool write_log(nvinfer1::ILogger* logger, nvinfer1::ILogger::Severity severity, const char* line) noexcept {
    const Slots* const slots = find_slots();
    if (logger == nullptr) logger = call_host<nvinfer1::ILogger*>("getLogger", nullptr);
    if (slots == nullptr || logger == nullptr) return false;
    call_virtual<void>(logger, slots->log, severity, line);
    return true;
}

}  // namespace qwenrt::tensorrt

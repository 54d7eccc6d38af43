// Stands in for TensorRT in the tests: a registry and a logger for the library that is loaded, and C functions through which
// Python calls a plugin's interfaces. It is loaded before the plugin, with global names, and claims to be the version it is told.
#include <NvInfer.h>

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "host_library.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IPluginCreatorInterface;
using nvinfer1::IPluginV3;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginTensorDesc;

namespace {

int32_t major_version = 0;
std::vector<const IPluginCreatorInterface*> registered;
std::string messages;
bool has_logger = true;

bool add(const IPluginCreatorInterface& creator) {
    for (const IPluginCreatorInterface* known : registered) {
        if (known == &creator) return false;
    }
    registered.push_back(&creator);
    return true;
}

bool remove(const IPluginCreatorInterface& creator) {
    for (size_t i = 0; i < registered.size(); ++i) {
        if (registered[i] != &creator) continue;
        registered.erase(registered.begin() + static_cast<ptrdiff_t>(i));
        return true;
    }
    return false;
}

void record(nvinfer1::ILogger::Severity severity, const char* line) {
    messages += std::to_string(static_cast<int32_t>(severity)) + " " + line + "\n";
}

// Tables of virtual functions as TensorRT 10 and 11 lay them out, of which the plugin may call these.
struct Registry10 {
    virtual void unused0() {}
    virtual void unused1() {}
    virtual void unused2() {}
    virtual ~Registry10() = default;  // two entries
    virtual void unused5() {}
    virtual void unused6() {}
    virtual void unused7() {}
    virtual void unused8() {}
    virtual void unused9() {}
    virtual void unused10() {}
    virtual void unused11() {}
    virtual bool register_creator(IPluginCreatorInterface& creator, const char*) noexcept { return add(creator); }
    virtual void unused13() {}
    virtual void unused14() {}
    virtual bool deregister_creator(const IPluginCreatorInterface& creator) noexcept { return remove(creator); }
};

struct Registry11 {
    virtual ~Registry11() = default;  // two entries
    virtual void unused2() {}
    virtual void unused3() {}
    virtual void unused4() {}
    virtual void unused5() {}
    virtual void unused6() {}
    virtual void unused7() {}
    virtual bool register_creator(IPluginCreatorInterface& creator, const char*) noexcept { return add(creator); }
    virtual void unused9() {}
    virtual void unused10() {}
    virtual bool deregister_creator(const IPluginCreatorInterface& creator) noexcept { return remove(creator); }
};

struct Logger10 {
    virtual void log(nvinfer1::ILogger::Severity severity, const char* line) noexcept { record(severity, line); }
    virtual ~Logger10() = default;
};

struct Logger11 {
    virtual void unused0() {}
    virtual void unused1() {}
    virtual ~Logger11() = default;  // two entries
    virtual void log(nvinfer1::ILogger::Severity severity, const char* line) noexcept { record(severity, line); }
};

Registry10 registry10;
Registry11 registry11;
Logger10 logger10;
Logger11 logger11;

void* logger() { return !has_logger ? nullptr : major_version == 10 ? static_cast<void*>(&logger10) : &logger11; }

class Finder final : public nvinfer1::ILoggerFinder {
public:
    nvinfer1::ILogger* findLogger() override {
        record(nvinfer1::ILogger::Severity::kVERBOSE, "asked for the logger");
        return static_cast<nvinfer1::ILogger*>(logger());
    }
};

class Expr final : public nvinfer1::IDimensionExpr {
public:
    explicit Expr(int64_t value) : value_(value) { mImpl = &implementation_; }
    ~Expr() noexcept override = default;

private:
    struct Implementation final : nvinfer1::apiv::VDimensionExpr {
        explicit Implementation(const Expr* owner) : owner(owner) {}
        bool isConstant() const override { return owner->value_ >= 0; }
        int64_t getConstantValue() const override { return owner->value_; }
        bool isSizeTensor() const override { return false; }
        const Expr* owner;
    };
    int64_t value_;
    Implementation implementation_{this};
};

class Builder final : public nvinfer1::IExprBuilder {
public:
    Builder() { mImpl = &implementation_; }
    ~Builder() noexcept override = default;

    const Expr* expr(int64_t value) { return &implementation_.exprs.emplace_back(value); }

private:
    struct Implementation final : nvinfer1::apiv::VExprBuilder {
        const nvinfer1::IDimensionExpr* constant(int64_t value) override { return &exprs.emplace_back(value); }
        const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation, const nvinfer1::IDimensionExpr&,
                                                  const nvinfer1::IDimensionExpr&) override {
            return nullptr;
        }
        const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                          const nvinfer1::IDimensionExpr&) override {
            return nullptr;
        }
        std::deque<Expr> exprs;
    };
    Implementation implementation_;
};

nvinfer1::IPluginV3OneCore* core(IPluginV3* plugin) {
    return static_cast<nvinfer1::IPluginV3OneCore*>(plugin->getCapabilityInterface(PluginCapabilityType::kCORE));
}

nvinfer1::IPluginV3OneBuildV2* build(IPluginV3* plugin) {
    return static_cast<nvinfer1::IPluginV3OneBuildV2*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

nvinfer1::IPluginV3OneRuntime* runtime(IPluginV3* plugin) {
    return static_cast<nvinfer1::IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

// Where a virtual member function lies in its class's table (Itanium C++ ABI).
template <typename Function>
int32_t slot(Function function) {
    ptrdiff_t words[2];
    static_assert(sizeof function == sizeof words);
    std::memcpy(words, &function, sizeof words);
#if defined(__aarch64__)
    return static_cast<int32_t>(words[0] / static_cast<ptrdiff_t>(sizeof(void*)));
#else
    return static_cast<int32_t>((words[0] - 1) / static_cast<ptrdiff_t>(sizeof(void*)));
#endif
}

}  // namespace

// What the plugin library looks for in a TensorRT.
EXPORT nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
    void* const registry = major_version == 10 ? static_cast<void*>(&registry10) : &registry11;
    return static_cast<nvinfer1::IPluginRegistry*>(registry);
}
EXPORT nvinfer1::ILogger* getLogger() noexcept { return static_cast<nvinfer1::ILogger*>(logger()); }
EXPORT int32_t getInferLibMajorVersion() noexcept { return major_version; }
EXPORT int32_t getInferLibMinorVersion() noexcept { return 7; }

// The tests' side.
EXPORT void host_set_version(int32_t major) { major_version = major; }
EXPORT void host_set_logger(int32_t on) { has_logger = on != 0; }
EXPORT int32_t host_num_registered() { return static_cast<int32_t>(registered.size()); }
EXPORT const char* host_take_messages() {
    static std::string taken;
    taken.swap(messages);
    messages.clear();
    return taken.c_str();
}
EXPORT nvinfer1::ILoggerFinder* host_logger_finder() {
    static Finder finder;
    return &finder;
}

// The slots that the headers of this build have, and those that the plugin takes for their version.
EXPORT void host_slots(int32_t* of_headers, int32_t* of_plugin) {
    using Registry = nvinfer1::IPluginRegistry;
    of_headers[0] = slot(static_cast<bool (Registry::*)(IPluginCreatorInterface&, const char*) noexcept>(&Registry::registerCreator));
    of_headers[1] = slot(static_cast<bool (Registry::*)(const IPluginCreatorInterface&) noexcept>(&Registry::deregisterCreator));
    of_headers[2] = slot(&nvinfer1::ILogger::log);
    const qwenrt::tensorrt::Slots slots = NV_TENSORRT_MAJOR == 10 ? qwenrt::tensorrt::kSlots10 : qwenrt::tensorrt::kSlots11;
    std::memcpy(of_plugin, &slots, sizeof slots);
}

EXPORT const char* creator_text(nvinfer1::IPluginCreatorV3One* creator) {
    static std::string text;
    const nvinfer1::InterfaceInfo info = creator->getInterfaceInfo();
    text = std::string(info.kind) + " " + std::to_string(info.major) + ": " + creator->getPluginNamespace() + "/" +
           creator->getPluginName() + "/" + creator->getPluginVersion();
    return text.c_str();
}
EXPORT const nvinfer1::PluginFieldCollection* creator_fields(nvinfer1::IPluginCreatorV3One* creator) { return creator->getFieldNames(); }
EXPORT IPluginV3* creator_create(nvinfer1::IPluginCreatorV3One* creator, const char* name,
                                 const nvinfer1::PluginFieldCollection* fields, int32_t phase) {
    return creator->createPlugin(name, fields, static_cast<nvinfer1::TensorRTPhase>(phase));
}

EXPORT void plugin_destroy(IPluginV3* plugin) { delete plugin; }
EXPORT IPluginV3* plugin_clone(IPluginV3* plugin) { return plugin->clone(); }
EXPORT IPluginV3* plugin_attach(IPluginV3* plugin) { return runtime(plugin)->attachToContext(nullptr); }
EXPORT const nvinfer1::PluginFieldCollection* plugin_serialize(IPluginV3* plugin) { return runtime(plugin)->getFieldsToSerialize(); }
EXPORT int32_t plugin_num_outputs(IPluginV3* plugin) { return build(plugin)->getNbOutputs(); }
EXPORT int32_t plugin_num_tactics(IPluginV3* plugin) { return build(plugin)->getNbTactics(); }
EXPORT int32_t plugin_aliased_input(IPluginV3* plugin, int32_t output) { return build(plugin)->getAliasedInput(output); }
EXPORT const char* plugin_timing_id(IPluginV3* plugin) { return build(plugin)->getTimingCacheID(); }
EXPORT const char* plugin_text(IPluginV3* plugin) {
    static std::string text;
    const nvinfer1::InterfaceInfo info = build(plugin)->getInterfaceInfo();
    text = std::string(info.kind) + " " + std::to_string(info.major) + ": " + core(plugin)->getPluginNamespace() + "/" +
           core(plugin)->getPluginName() + "/" + core(plugin)->getPluginVersion();
    return text.c_str();
}
EXPORT int32_t plugin_output_types(IPluginV3* plugin, DataType* outputs, int32_t num_outputs, const DataType* inputs,
                                   int32_t num_inputs) {
    return build(plugin)->getOutputDataTypes(outputs, num_outputs, inputs, num_inputs);
}

// Dimensions of -1 are not constant; one of the outputs' is told by -1 - its position among all the inputs' dimensions.
EXPORT int32_t plugin_output_shapes(IPluginV3* plugin, const Dims* inputs, int32_t num_inputs, Dims* outputs, int32_t num_outputs) {
    Builder builder;
    std::vector<DimsExprs> exprs(static_cast<size_t>(num_inputs)), results(static_cast<size_t>(num_outputs));
    std::vector<const nvinfer1::IDimensionExpr*> all;
    for (int32_t i = 0; i < num_inputs; ++i) {
        exprs[i].nbDims = inputs[i].nbDims;
        for (int32_t k = 0; k < inputs[i].nbDims; ++k) all.push_back(exprs[i].d[k] = builder.expr(inputs[i].d[k]));
    }
    const int32_t status =
        build(plugin)->getOutputShapes(exprs.data(), num_inputs, nullptr, 0, results.data(), num_outputs, builder);
    for (int32_t i = 0; status == 0 && i < num_outputs; ++i) {
        outputs[i].nbDims = results[i].nbDims;
        for (int32_t k = 0; k < results[i].nbDims; ++k) {
            const nvinfer1::IDimensionExpr* const expr = results[i].d[k];
            outputs[i].d[k] = expr->getConstantValue();
            for (size_t at = 0; !expr->isConstant() && at < all.size(); ++at) {
                if (all[at] == expr) outputs[i].d[k] = -1 - static_cast<int64_t>(at);
            }
        }
    }
    return status;
}

EXPORT int32_t plugin_supports(IPluginV3* plugin, int32_t position, const DynamicPluginTensorDesc* values, int32_t num_inputs,
                               int32_t num_outputs) {
    return build(plugin)->supportsFormatCombination(position, values, num_inputs, num_outputs);
}
EXPORT int32_t plugin_configure(IPluginV3* plugin, const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                const DynamicPluginTensorDesc* outputs, int32_t num_outputs) {
    return build(plugin)->configurePlugin(inputs, num_inputs, outputs, num_outputs);
}
EXPORT size_t plugin_workspace_size(IPluginV3* plugin, const DynamicPluginTensorDesc* inputs, int32_t num_inputs,
                                    const DynamicPluginTensorDesc* outputs, int32_t num_outputs) {
    return build(plugin)->getWorkspaceSize(inputs, num_inputs, outputs, num_outputs);
}
EXPORT int32_t plugin_shape_change(IPluginV3* plugin, const PluginTensorDesc* inputs, int32_t num_inputs,
                                   const PluginTensorDesc* outputs, int32_t num_outputs) {
    return runtime(plugin)->onShapeChange(inputs, num_inputs, outputs, num_outputs);
}
EXPORT int32_t plugin_enqueue(IPluginV3* plugin, const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                              const void* const* inputs, void* const* outputs, void* workspace) {
    return runtime(plugin)->enqueue(input_descs, output_descs, inputs, outputs, workspace, nullptr);
}
EXPORT void host_sizes(size_t* sizes) {
    sizes[0] = sizeof(nvinfer1::PluginField);
    sizes[1] = sizeof(nvinfer1::PluginFieldCollection);
    sizes[2] = sizeof(Dims);
    sizes[3] = sizeof(PluginTensorDesc);
    sizes[4] = sizeof(DynamicPluginTensorDesc);
}

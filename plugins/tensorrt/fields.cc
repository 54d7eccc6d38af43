#include "fields.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>

namespace qwenrt::tensorrt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

template <typename T>
T element(const PluginField& field) {
    T value;
    std::memcpy(&value, field.data, sizeof value);
    return value;
}

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

}  // namespace

const PluginField* find_field(const nvinfer1::PluginFieldCollection& fields, const std::string& name) {
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        const PluginField& field = fields.fields[i];
        if (field.name == nullptr || name != field.name) continue;
        if (field.data == nullptr || field.length != 1) fail(name + " must be one number");
        return &field;
    }
    return nullptr;
}

void read_field(const PluginField& field, int32_t& value) {
    if (field.type == PluginFieldType::kINT32) {
        value = element<int32_t>(field);
        return;
    }
    if (field.type != PluginFieldType::kINT64) fail(std::string(field.name) + " must be an integer");
    const int64_t wide = element<int64_t>(field);
    if (wide < std::numeric_limits<int32_t>::min() || wide > std::numeric_limits<int32_t>::max()) {
        fail(std::string(field.name) + " is " + std::to_string(wide) + ", which does not fit in 32 bits");
    }
    value = static_cast<int32_t>(wide);
}

void read_field(const PluginField& field, float& value) {
    if (field.type == PluginFieldType::kFLOAT32) {
        value = element<float>(field);
    } else if (field.type == PluginFieldType::kFLOAT64) {
        value = static_cast<float>(element<double>(field));
    } else {
        fail(std::string(field.name) + " must be a float");
    }
}

void check_plan_version(const nvinfer1::PluginFieldCollection& fields) {
    const PluginField* const field = find_field(fields, kPlanVersionField);
    int32_t version = 0;
    if (field != nullptr) read_field(*field, version);
    if (version != kPlanVersion) {
        fail("the plan was built with " + (field == nullptr ? "another plugin" : "plan_version " + std::to_string(version)) +
             ", this plugin library reads plan_version " + std::to_string(kPlanVersion) + ": export the engine again");
    }
}

void check_field_names(const nvinfer1::PluginFieldCollection& fields, const std::vector<std::string>& names, bool plan) {
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        const std::string name = fields.fields[i].name == nullptr ? "without a name" : fields.fields[i].name;
        if (std::find(names.begin(), names.end(), name) != names.end() || (plan && name == kPlanVersionField)) continue;
        std::string list;
        for (const std::string& known : names) list += (list.empty() ? "" : ", ") + known;
        fail("unknown attribute " + name + "; there are: " + list);
    }
}

std::string number_text(int32_t value) { return std::to_string(value); }

std::string number_text(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
    return text;
}

}  // namespace qwenrt::tensorrt

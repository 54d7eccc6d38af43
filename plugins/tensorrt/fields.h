// Attributes of an op, from and to TensorRT's plugin fields.
//
// A struct of attributes has members of int32_t and float; its static for_each(attributes, visit) calls visit(name, member, whether
// a node must have it) for each, in the order of the schema; its check() throws std::invalid_argument where the kernels have no such.
#pragma once

#include <NvInferRuntime.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "qwenrt_ops.h"

namespace qwenrt::tensorrt {

// Version of what a plan keeps of a plugin.
inline constexpr int32_t kPlanVersion = ops::kPlanVersion;
inline constexpr char kPlanVersionField[] = "plan_version";

// The field of that name; null if there is none. Throws std::invalid_argument where it is not one number.
const nvinfer1::PluginField* find_field(const nvinfer1::PluginFieldCollection& fields, const std::string& name);

// Throws std::invalid_argument naming the field where it has no such number.
void read_field(const nvinfer1::PluginField& field, int32_t& value);
void read_field(const nvinfer1::PluginField& field, float& value);

// Throws std::invalid_argument if the plan's fields are of another version.
void check_plan_version(const nvinfer1::PluginFieldCollection& fields);

// Throws std::invalid_argument naming a field that is not among `names`.
void check_field_names(const nvinfer1::PluginFieldCollection& fields, const std::vector<std::string>& names, bool plan);

std::string number_text(int32_t value);
std::string number_text(float value);

// From the attributes of an ONNX node (kBUILD), or from a plan (kRUNTIME), which also has its version. Throws
// std::invalid_argument naming the field, its value and what is allowed.
template <typename Attributes>
Attributes attributes_from(const nvinfer1::PluginFieldCollection& fields, nvinfer1::TensorRTPhase phase) {
    const bool plan = phase == nvinfer1::TensorRTPhase::kRUNTIME;
    if (plan) check_plan_version(fields);
    Attributes attributes;
    std::vector<std::string> names;
    Attributes::for_each(attributes, [&](const char* name, auto&, bool) { names.emplace_back(name); });
    check_field_names(fields, names, plan);
    Attributes::for_each(attributes, [&](const char* name, auto& member, bool required) {
        if (const nvinfer1::PluginField* const field = find_field(fields, name)) {
            read_field(*field, member);
        } else if (required || plan) {
            throw std::invalid_argument("attribute " + std::string(name) + " is missing");
        }
    });
    attributes.check();
    return attributes;
}

// The attributes' fields, in the order of the schema. They point into `attributes`.
template <typename Attributes>
std::vector<nvinfer1::PluginField> fields_of(const Attributes& attributes) {
    std::vector<nvinfer1::PluginField> fields;
    Attributes::for_each(attributes, [&](const char* name, const auto& member, bool) {
        const bool is_float = std::is_same_v<decltype(member), const float&>;
        const auto type = is_float ? nvinfer1::PluginFieldType::kFLOAT32 : nvinfer1::PluginFieldType::kINT32;
        fields.emplace_back(name, &member, type, 1);
    });
    return fields;
}

// "num_heads=16 num_kv_heads=8 ...": the same for equal attributes only.
template <typename Attributes>
std::string text_of(const Attributes& attributes) {
    std::string text;
    Attributes::for_each(attributes, [&](const char* name, const auto& member, bool) {
        text += (text.empty() ? "" : " ") + std::string(name) + "=" + number_text(member);
    });
    return text;
}

}  // namespace qwenrt::tensorrt

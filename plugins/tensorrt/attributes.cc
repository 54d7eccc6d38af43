#include "attributes.h"

#include <cstdio>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <type_traits>

namespace qwenrt::tensorrt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using namespace ops::paged_attention;

template <typename T>
T element(const PluginField& field) {
    T value;
    std::memcpy(&value, field.data, sizeof value);
    return value;
}

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void read(const PluginField& field, int32_t& value) {
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

void read(const PluginField& field, float& value) {
    if (field.type == PluginFieldType::kFLOAT32) {
        value = element<float>(field);
    } else if (field.type == PluginFieldType::kFLOAT64) {
        value = static_cast<float>(element<double>(field));
    } else {
        fail(std::string(field.name) + " must be a float");
    }
}

// Calls visit(name, member, whether a node must have it) for every attribute, in the order of the schema.
template <typename A, typename Visit>
void for_each(A& attributes, const Visit& visit) {
    visit(kNumHeadsAttribute, attributes.num_heads, true);
    visit(kNumKvHeadsAttribute, attributes.num_kv_heads, true);
    visit(kHeadDimAttribute, attributes.head_dim, true);
    visit(kBlockSizeAttribute, attributes.block_size, true);
    visit(kScaleAttribute, attributes.scale, true);
    visit(kNormEpsAttribute, attributes.norm_eps, false);
    visit(kSlidingWindowAttribute, attributes.sliding_window, false);
}

std::string number(int32_t value) { return std::to_string(value); }

std::string number(float value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
    return text;
}

const PluginField* find(const nvinfer1::PluginFieldCollection& fields, const std::string& name) {
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        const PluginField& field = fields.fields[i];
        if (field.name == nullptr || name != field.name) continue;
        if (field.data == nullptr || field.length != 1) fail(name + " must be one number");
        return &field;
    }
    return nullptr;
}

void check_version(const nvinfer1::PluginFieldCollection& fields) {
    const PluginField* const field = find(fields, kPlanVersionField);
    int32_t version = 0;
    if (field != nullptr) read(*field, version);
    if (version != kPlanVersion) {
        fail("the plan was built with " + (field == nullptr ? "another plugin" : "plan_version " + std::to_string(version)) +
             ", this plugin library reads plan_version " + std::to_string(kPlanVersion) + ": export the engine again");
    }
}

void check_names(const nvinfer1::PluginFieldCollection& fields, bool plan) {
    std::set<std::string> known;
    std::string list;
    const Attributes any;
    for_each(any, [&](const char* name, auto, bool) {
        known.insert(name);
        list += (list.empty() ? "" : ", ") + std::string(name);
    });
    if (plan) known.insert(kPlanVersionField);
    for (int32_t i = 0; i < fields.nbFields; ++i) {
        const char* const name = fields.fields[i].name;
        if (name == nullptr || known.count(name) == 0) {
            fail("unknown attribute " + std::string(name == nullptr ? "without a name" : name) + "; there are: " + list);
        }
    }
}

}  // namespace

Attributes Attributes::from_fields(const nvinfer1::PluginFieldCollection& fields, nvinfer1::TensorRTPhase phase) {
    const bool plan = phase == nvinfer1::TensorRTPhase::kRUNTIME;
    if (plan) check_version(fields);
    check_names(fields, plan);
    Attributes attributes;
    for_each(attributes, [&](const char* name, auto& member, bool required) {
        if (const PluginField* const field = find(fields, name)) {
            read(*field, member);
        } else if (required || plan) {
            fail("attribute " + std::string(name) + " is missing");
        }
    });
    const cuda::PagedAttentionShape shape = attributes.shape(cuda::DataType::kFloat16, cuda::DataType::kFloat16);
    if (const char* const reason = qwenrt_paged_attention_unsupported(&shape)) {
        fail(std::string(reason) + " (" + attributes.text() + ")");
    }
    return attributes;
}

std::vector<PluginField> Attributes::fields() const {
    std::vector<PluginField> fields;
    for_each(*this, [&](const char* name, const auto& member, bool) {
        const bool is_float = std::is_same_v<decltype(member), const float&>;
        fields.emplace_back(name, &member, is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
    });
    return fields;
}

std::string Attributes::text() const {
    std::string text;
    for_each(*this, [&](const char* name, auto member, bool) {
        text += (text.empty() ? "" : " ") + std::string(name) + "=" + number(member);
    });
    return text;
}

cuda::PagedAttentionShape Attributes::shape(cuda::DataType dtype, cuda::DataType kv_dtype) const {
    cuda::PagedAttentionShape shape{};
    shape.num_heads = num_heads;
    shape.num_kv_heads = num_kv_heads;
    shape.head_dim = head_dim;
    shape.block_size = block_size;
    shape.sliding_window = sliding_window;
    shape.scale = scale;
    shape.norm_eps = norm_eps;
    shape.dtype = dtype;
    shape.kv_dtype = kv_dtype;
    return shape;
}

}  // namespace qwenrt::tensorrt

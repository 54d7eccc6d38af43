// What a kernel asks of ONNX Runtime's C interface: its inputs and their shapes, outputs, attributes and threads. For the one file that has
// the kernels.
#pragma once

#include <onnxruntime_c_api.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "run.h"

namespace {

using qwenrt::InvalidArgument;

constexpr uint32_t kApiVersion = 17;  // the first with KernelContext_ParallelFor

const OrtApi* api = nullptr;

struct StatusError : std::exception {
  explicit StatusError(OrtStatus* failed) : status(failed) {}
  OrtStatus* status;
};

void check(OrtStatus* status) {
  if (status != nullptr) throw StatusError(status);
}

// Runs what may throw behind ONNX Runtime's C interface, where nothing may.
template <class Body>
OrtStatus* guarded(const Body& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const StatusError& e) {
    return e.status;
  } catch (const InvalidArgument& e) {
    return api->CreateStatus(ORT_INVALID_ARGUMENT, e.what());
  } catch (const std::exception& e) {
    return api->CreateStatus(ORT_RUNTIME_EXCEPTION, e.what());
  }
}

std::string to_string(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

struct Tensor {
  const char* name;
  const void* data;
  std::vector<int64_t> shape;

  template <class T>
  const T* as() const {
    return static_cast<const T*>(data);
  }

  void expect_rank(size_t rank) const {
    if (shape.size() != rank)
      throw InvalidArgument(std::string(name) + " has shape " + to_string(shape) + ", expected " + std::to_string(rank) +
                            (rank == 1 ? " dimension" : " dimensions"));
  }

  void expect_shape(const std::vector<int64_t>& expected) const {
    if (shape != expected)
      throw InvalidArgument(std::string(name) + " has shape " + to_string(shape) + ", expected " + to_string(expected));
  }
};

// An input that is there and has the element type that the op declares, which ONNX Runtime sees to.
Tensor input(const OrtKernelContext* context, size_t index, const char* name) {
  const OrtValue* value = nullptr;
  check(api->KernelContext_GetInput(context, index, &value));
  if (value == nullptr) throw InvalidArgument(std::string(name) + " is missing");
  OrtTensorTypeAndShapeInfo* raw = nullptr;
  check(api->GetTensorTypeAndShape(value, &raw));
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> info(
      raw, api->ReleaseTensorTypeAndShapeInfo);
  size_t rank = 0;
  check(api->GetDimensionsCount(raw, &rank));
  Tensor tensor{name, nullptr, std::vector<int64_t>(rank)};
  check(api->GetDimensions(raw, tensor.shape.data(), rank));
  void* data = nullptr;
  check(api->GetTensorMutableData(const_cast<OrtValue*>(value), &data));
  tensor.data = data;
  return tensor;
}

bool has_input(const OrtKernelContext* context, size_t index) {
  size_t count = 0;
  check(api->KernelContext_GetInputCount(context, &count));
  const OrtValue* value = nullptr;
  if (index < count) check(api->KernelContext_GetInput(context, index, &value));
  return value != nullptr;
}

void* output(OrtKernelContext* context, size_t index, const std::vector<int64_t>& shape) {
  OrtValue* value = nullptr;
  check(api->KernelContext_GetOutput(context, index, shape.data(), shape.size(), &value));
  void* data = nullptr;
  check(api->GetTensorMutableData(value, &data));
  return data;
}

// ONNX Runtime's own threads. How many there are it does not say; a machine's cores are the usual number.
qwenrt::Parallel threads_of(const OrtKernelContext* context) {
  const auto run = [context](int64_t tasks, const std::function<void(int64_t)>& work) {
    if (tasks == 1) return work(0);
    const auto call = [](void* data, size_t task) {
      (*static_cast<const std::function<void(int64_t)>*>(data))(static_cast<int64_t>(task));
    };
    check(api->KernelContext_ParallelFor(context, call, static_cast<size_t>(tasks), 0,
                                         const_cast<std::function<void(int64_t)>*>(&work)));
  };
  return {run, static_cast<int64_t>(std::max(1u, std::thread::hardware_concurrency()))};
}

int64_t integer_attribute(const OrtKernelInfo* info, const char* name) {
  int64_t value = 0;
  check(api->KernelInfoGetAttribute_int64(info, name, &value));
  return value;
}

float float_attribute(const OrtKernelInfo* info, const char* name) {
  float value = 0;
  check(api->KernelInfoGetAttribute_float(info, name, &value));
  return value;
}

// The value of an attribute that may be left out.
template <class T>
T attribute_or(T (*get)(const OrtKernelInfo*, const char*), const OrtKernelInfo* info, const char* name, T otherwise) {
  try {
    return get(info, name);
  } catch (const StatusError& e) {
    api->ReleaseStatus(e.status);
    return otherwise;
  }
}

}  // namespace

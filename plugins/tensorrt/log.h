// One line to TensorRT's logger, wherever that is found.
#pragma once

#include <NvInferRuntime.h>

#include <exception>
#include <string>

namespace qwenrt::tensorrt {

using Severity = nvinfer1::ILogger::Severity;

// Who calls knows the logger of its engine: TensorRT hands this over where the library is part of a plan.
void set_logger_finder(nvinfer1::ILoggerFinder* finder);

// Writes "op: message" to the finder's logger, else to the one of the TensorRT in this process, else to stderr.
void log(const char* op, Severity severity, const std::string& message) noexcept;

// Runs what may throw on behalf of TensorRT, into which nothing may: logs the error and returns `failure`.
template <typename Result, typename Body>
Result guarded(const char* op, Result failure, const Body& body) noexcept {
    try {
        return body();
    } catch (const std::exception& error) {
        log(op, Severity::kERROR, error.what());
        return failure;
    }
}

}  // namespace qwenrt::tensorrt

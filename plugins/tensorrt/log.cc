#include "log.h"

#include <atomic>
#include <cstdio>

#include "host_library.h"

namespace qwenrt::tensorrt {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) { logger_finder = finder; }

void log(const char* op, Severity severity, const std::string& message) noexcept {
    try {
        const std::string line = std::string(op) + ": " + message;
        nvinfer1::ILoggerFinder* const finder = logger_finder;
        const bool written = write_log(finder == nullptr ? nullptr : finder->findLogger(), severity, line.c_str());
        if (!written && severity <= Severity::kWARNING) std::fprintf(stderr, "%s\n", line.c_str());
    } catch (const std::exception&) {
        std::fputs("qwenrt: an error could not be logged\n", stderr);
    }
}

}  // namespace qwenrt::tensorrt

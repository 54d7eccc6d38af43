// The TensorRT that is loaded in this process, found at run time: linked against none, one plugin library serves TensorRT 10,
// TensorRT 11 and TensorRT for RTX, whichever headers it was compiled with, and can be loaded where there is no TensorRT at all.
#pragma once

#include <NvInferRuntime.h>

namespace qwenrt::tensorrt {

// Where the functions that are called here lie in the tables of virtual functions of IPluginRegistry and ILogger. TensorRT 11 and
// TensorRT for RTX have other functions before them than TensorRT 10, so a call by the class in one version's headers would end
// in another function of the other version.
struct Slots {
    int32_t register_creator;
    int32_t deregister_creator;
    int32_t log;
};

inline constexpr Slots kSlots10{12, 15, 0};
inline constexpr Slots kSlots11{8, 11, 4};

// Adds a creator to the registry of the TensorRT in this process. False if there is none of a known version, or its registry has
// such a creator.
bool register_creator(nvinfer1::IPluginCreatorInterface& creator) noexcept;

void deregister_creator(const nvinfer1::IPluginCreatorInterface& creator) noexcept;

// Gives the line to `logger`, or if that is null to the logger of the TensorRT in this process. False if there is none.
bool write_log(nvinfer1::ILogger* logger, nvinfer1::ILogger::Severity severity, const char* line) noexcept;

}  // namespace qwenrt::tensorrt

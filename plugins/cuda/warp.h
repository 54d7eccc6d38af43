// The size of a warp.
#pragma once

namespace qwenrt::cuda {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

}  // namespace qwenrt::cuda

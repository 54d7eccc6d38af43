// Addresses on the host's side of a launch: what is aligned, and how a workspace is divided.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qwenrt::cuda {

inline bool misaligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 != 0; }

// Gives out pieces of a workspace, each on a boundary of 256 bytes.
class Divider {
public:
    explicit Divider(void* memory) : start_(reinterpret_cast<uintptr_t>(memory)) {}

    template <typename T>
    T* take(size_t count) {
        const uintptr_t piece = start_ + taken_;
        taken_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        return reinterpret_cast<T*>(piece);
    }

    size_t taken() const { return taken_; }

private:
    static constexpr size_t kAlignment = 256;
    uintptr_t start_;
    size_t taken_ = 0;
};

}  // namespace qwenrt::cuda

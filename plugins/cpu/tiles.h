// AMX's tiles: 16 rows of 64 bytes at most.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace qwenrt::QWENRT_ISA {
namespace {

constexpr int64_t kTile = 16;

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// What tile T holds. The compiler's own functions take no template's argument.
template <int T>
void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%1, %2, 1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c0, (%1, %2, 1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
}
// Sums += A B, of bfloat16s.
template <int Sums, int A, int B>
void multiply_tiles() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

// A tile is loaded from what was written just now, which the compiler is not told.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

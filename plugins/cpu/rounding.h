// Rows of floats rounded to integers for one instruction set: include after defining QWENRT_ISA.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// The first `count` floats of a vector, zeros after them.
Floats load_first(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float first[kLanes] = {};
  std::memcpy(first, p, sizeof(float) * static_cast<size_t>(count));
  return load(first);
}

void store_first(float* p, Floats v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  float all[kLanes];
  store(all, v);
  std::memcpy(p, all, sizeof(float) * static_cast<size_t>(count));
}

#if defined(__AVX2__) && !defined(__AVX512F__)

// GCC would take every one of them out of its register.
__m128i as_words(Ints v) {
  const __m256i whole = (__m256i)v;
  return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}
void store_bytes(int8_t* p, Ints v) {
  const __m128i words = as_words(v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
// Of each quad the even ones before the odd ones.
void store_words(int8_t* p, Ints v) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(as_words(v), order));
}

#else

void store_bytes(int8_t* p, Ints v) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  std::memcpy(p, &bytes, sizeof bytes);
}

#endif

constexpr int32_t kInfinity = 0x7f800000, kSmallest = 0x0d800000;  // 2^-100: what is smaller counts as 0

// Calls store_values(k, values of columns k to k + kLanes - 1) with integers within +-most whose largest stands for the largest magnitude
// of the row, zeros beyond `depth`; returns what their unit stands for. Without a call: 0 for a row of zeros or of what counts as such, NaN
// for one that is not finite. Magnitudes are compared as bits, in which a NaN is larger than all.
template <class StoreValues>
float round_values(const float* x, int64_t depth, int32_t most, const StoreValues& store_values) {
  Ints tops{};
  for (int64_t k = 0; k < depth; k += kLanes) {
    const Ints bits = (Ints)load_first(x + k, depth - k) & 0x7fffffff;
    tops = bits > tops ? bits : tops;
  }
  int32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = tops[i] > top ? tops[i] : top;
  if (top >= kInfinity) return from_bits(0x7fc00000);
  if (top < kSmallest) return 0;
  const float largest = from_bits(static_cast<uint32_t>(top));
  // Adding 1.5 * 2^23 leaves the value rounded to nearest even in the last bits.
  const Floats round = broadcast(0x1.8p23f), factor = broadcast(static_cast<float>(most) / largest);
  for (int64_t k = 0; k < depth; k += kLanes) store_values(k, (Ints)(load_first(x + k, depth - k) * factor + round) - (Ints)round);
  return largest / static_cast<float>(most);
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

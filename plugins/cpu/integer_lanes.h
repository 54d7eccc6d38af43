// Products of int8 products for the 16 output channels of a panel, in the registers that the including file is compiled for. All of it
// is exact, so the instruction set does not show in a result.
#pragma once

#include <cstdint>

#include "linear.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qwenrt::QWENRT_ISA {

// Each instruction set has, for int8:
//   Part     kPanelWidth channels of as many columns as one instruction takes, kStepParts of them in a step of 8 columns; `load_part`
//            loads the i-th
//   Products     one int32 for each channel; what they start from depends on the sum of the row of x
//   add      products of a part with x, of which a part takes kPartBytes, in words if kWords
// for 4-bit codes that are multiplied as they are, sum((code - z) * m * x) = m * sum((code - z) * x):
//   Codes    four columns; `load_codes` loads a pair of them, of which a byte's low halves are the first
//   CodeGroup    multipliers m and zero points z of a panel's 16 channels, from bytes m | z << 4
//   Dots     sums of (code - z) * x over a run of kRunSteps steps at most. They start from z and a word that minus_sums has made of the run
// How many sums its registers hold, and what is the fastest with so many rows of x:
//   kBlockRows, kBlockPanels    rows and panels of a block of sums
//   kWideRows    up to so many rows, and one panel, are a block too; 0: never
//   kCodeRows    codes are multiplied as they are by so many rows at a time, up to kMostCodeRows rows; beyond those they are widened to int8

#if defined(__AVX512VNNI__)

using Part = __m512i;
using Products = __m512i;
constexpr int kStepParts = 2, kPartBytes = 4;
constexpr bool kWords = false;
// The instruction wants one side unsigned: weights are raised by 128, and the sums start lower.
// Rows that are computed only to fill a block may have any sum: hence the unsigned product.
inline Products start(int32_t sum_of_x) { return _mm512_set1_epi32(static_cast<int32_t>(-128u * static_cast<uint32_t>(sum_of_x))); }
inline Part raised(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
inline Part load_part(const int8_t* step, int i) { return raised(_mm512_loadu_si512(step + i * kQuadBytes)); }
inline void add(Products& sums, Part w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  sums = _mm512_dpbusd_epi32(sums, w, _mm512_set1_epi32(four));
}
inline void store_products(int32_t* p, Products v) { _mm512_storeu_si512(p, v); }
constexpr int kBlockRows = 8, kBlockPanels = 2, kWideRows = 16;

// Of four quads they are at most 4 * 4 * 15 * 127, which fits 16 bits: a multiplication of halves then does, and adds in one.
using Codes = __m512i;
using Dots = __m512i;
constexpr int64_t kRunSteps = 2;
struct CodeGroup {
  __m512i multiplier, zero_point;
};
inline __m512i load_codes(const uint8_t* pairs) { return _mm512_loadu_si512(pairs); }
inline Codes low(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Codes high(__m512i v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline CodeGroup load_code_group(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_and_si512(bytes, _mm512_set1_epi32(15)), _mm512_srli_epi32(bytes, 4)};
}
inline Dots start_dots(const CodeGroup& g, int32_t minus_sum) { return _mm512_mullo_epi16(g.zero_point, _mm512_set1_epi32(minus_sum)); }
inline void add_codes(Dots& dots, Codes codes, const int8_t* x) { add(dots, codes, x); }
inline Products no_products() { return _mm512_setzero_si512(); }
inline void add_dots(Products& sums, const Dots& dots, const CodeGroup& g) { sums = _mm512_dpwssd_epi32(sums, dots, g.multiplier); }
constexpr int kCodeRows = 3;
constexpr int64_t kMostCodeRows = 3;

#elif defined(__AVX2__) && !defined(__AVX512F__)

struct Halves {
  __m256i half[2];
};
inline Halves load_halves(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
// GCC would rather add two products first, and has not the registers for it.
inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

// Products of 8 bits want one side unsigned, and to move signs to the other takes as long as a product, for every row. So the even columns
// of a quad, then the odd ones, become words once for some rows, and x once for all panels.
using Part = Halves;
using Products = Halves;
constexpr int kStepParts = 4, kPartBytes = 4;
constexpr bool kWords = true;
inline Products start(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Part load_part(const int8_t* step, int i) {
  Part part = load_halves(step + i / 2 * kQuadBytes);
  for (__m256i& half : part.half) half = _mm256_srai_epi16(i % 2 == 0 ? _mm256_slli_epi16(half, 8) : half, 8);
  return part;
}
inline void add(Products& sums, const Part& w, const int8_t* x) {
  int32_t two;
  __builtin_memcpy(&two, x, sizeof two);
  for (int i = 0; i < 2; ++i) {
    sums.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(w.half[i], _mm256_set1_epi32(two)));
    keep_order(sums.half[i]);
  }
}
inline void store_products(int32_t* p, const Products& v) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, v.half[0]);
  _mm256_storeu_si256(q + 1, v.half[1]);
}
constexpr int kBlockRows = 4, kBlockPanels = 1, kWideRows = 0;

// Sums of pairs in 16 bits, the first two columns of quads and the last two: of eight quads they are at most 8 * 2 * 15 * 127.
using Codes = Halves;
using Dots = Halves;
constexpr int64_t kRunSteps = 4;
struct CodeGroup {
  Halves multiplier, zero_point;
};
inline Halves load_codes(const uint8_t* pairs) { return load_halves(pairs); }
inline __m256i low(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline __m256i high(__m256i v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline Codes low(const Halves& v) { return {low(v.half[0]), low(v.half[1])}; }
inline Codes high(const Halves& v) { return {high(v.half[0]), high(v.half[1])}; }
inline CodeGroup load_code_group(const uint8_t* p) {
  CodeGroup g;
  for (int i = 0; i < 2; ++i) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
    const __m256i twice = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 16));
    g.multiplier.half[i] = _mm256_and_si256(twice, _mm256_set1_epi16(15));
    g.zero_point.half[i] = _mm256_srli_epi16(twice, 4);
  }
  return g;
}
inline int32_t minus_sums(const int8_t* x, int64_t columns) {
  __m128i sums = _mm_setzero_si128();
  for (int64_t k = 0; k < columns; k += 2 * kQuad)
    sums = _mm_sub_epi16(sums, _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x + k))));
  return _mm_cvtsi128_si32(_mm_add_epi16(sums, _mm_srli_epi64(sums, 32)));
}
inline Dots start_dots(const CodeGroup& g, int32_t minus_sums) {
  const __m256i both = _mm256_set1_epi32(minus_sums);
  return {_mm256_mullo_epi16(g.zero_point.half[0], both), _mm256_mullo_epi16(g.zero_point.half[1], both)};
}
inline void add_codes(Dots& dots, const Codes& codes, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  for (int i = 0; i < 2; ++i) {
    dots.half[i] = _mm256_add_epi16(dots.half[i], _mm256_maddubs_epi16(codes.half[i], _mm256_set1_epi32(four)));
    keep_order(dots.half[i]);
  }
}
inline Products no_products() { return start(0); }
inline void add_dots(Products& sums, const Dots& dots, const CodeGroup& g) {
  for (int i = 0; i < 2; ++i) sums.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(dots.half[i], g.multiplier.half[i]));
}
constexpr int kCodeRows = 4;
constexpr int64_t kMostCodeRows = INT64_MAX;

#else

struct Quad {
  int8_t value[kQuadBytes];
};
inline Quad load_quad(const void* p) {
  Quad v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

using Part = Quad;
struct Products {
  int32_t value[kPanelWidth];
};
constexpr int kStepParts = 2, kPartBytes = 4;
constexpr bool kWords = false;
inline Products start(int32_t) { return {}; }
inline Part load_part(const int8_t* step, int i) { return load_quad(step + i * kQuadBytes); }
inline void add(Products& sums, const Part& w, const int8_t* x) {
  for (int i = 0; i < kQuadBytes; ++i) sums.value[i / kQuad] += w.value[i] * x[i % kQuad];
}
inline void store_products(int32_t* p, const Products& v) { __builtin_memcpy(p, &v, sizeof v); }
constexpr int kBlockRows = 4, kBlockPanels = 1, kWideRows = 0;

using Codes = Quad;
using Dots = Products;
constexpr int64_t kRunSteps = 4;
struct CodeGroup {
  int32_t multiplier[kPanelWidth], zero_point[kPanelWidth];
};
inline Quad load_codes(const uint8_t* pairs) { return load_quad(pairs); }
inline Codes low(const Quad& v) {
  Codes codes;
  for (int i = 0; i < kQuadBytes; ++i) codes.value[i] = static_cast<int8_t>(v.value[i] & 15);
  return codes;
}
inline Codes high(const Quad& v) {
  Codes codes;
  for (int i = 0; i < kQuadBytes; ++i) codes.value[i] = static_cast<int8_t>(v.value[i] >> 4 & 15);
  return codes;
}
inline CodeGroup load_code_group(const uint8_t* p) {
  CodeGroup g;
  for (int n = 0; n < kPanelWidth; ++n) g.multiplier[n] = p[n] & 15, g.zero_point[n] = p[n] >> 4;
  return g;
}
inline Dots start_dots(const CodeGroup& g, int32_t minus_sum) {
  Dots dots;
  for (int n = 0; n < kPanelWidth; ++n) dots.value[n] = g.zero_point[n] * minus_sum;
  return dots;
}
inline void add_codes(Dots& dots, const Codes& codes, const int8_t* x) { add(dots, codes, x); }
inline Products no_products() { return {}; }
inline void add_dots(Products& sums, const Dots& dots, const CodeGroup& g) {
  // Weights that are none of the format's may overflow; that must be as harmless as in registers.
  for (int n = 0; n < kPanelWidth; ++n)
    sums.value[n] = static_cast<int32_t>(static_cast<uint32_t>(sums.value[n]) + static_cast<uint32_t>(g.multiplier[n] * dots.value[n]));
}
constexpr int kCodeRows = 4;
constexpr int64_t kMostCodeRows = INT64_MAX;

#endif

#if defined(__AVX512F__) || !defined(__AVX2__)

// Dots of one sum start from one.
inline int32_t minus_sums(const int8_t* x, int64_t columns) {
  int32_t sum = 0;
  for (int64_t k = 0; k < columns; ++k) sum -= x[k];
  return sum;
}

#endif

}  // namespace qwenrt::QWENRT_ISA

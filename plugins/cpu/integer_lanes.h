// Products of int8 products for the 16 output channels of a panel, in the registers that the including file is compiled for. All of it
// is exact, so the instruction set does not show in a result.
#pragma once

#include "linear.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qwenrt::QWENRT_ISA {

// Each instruction set has:
//   Quad     four columns of a panel, int8
//   Pair     the same, two 4-bit codes to a byte: low halves are one quad, high halves the next
//   Group    multipliers m and zero points z of a panel's 16 channels, from bytes m | z << 4
//   widen    (code - z) * m. The product of a code and m is at most 225, so one 16-bit multiplication does two bytes
//   prepared     a quad as `add` wants it, and a group of which `widen` makes such
//   Products     one int32 for each channel; what they start from depends on the sum of the row of x
//   add      products of a quad with four values of x
// and for codes that are multiplied as they are, sum((code - z) * m * x) = m * sum(code * x) - m * z * sum(x) in each group:
//   Dots     sums of code * x, of kRunPairs pairs at most
//   CodeGroup    m and m * z of a panel's 16 channels
// How many sums its registers hold, and what is the fastest with so many rows of x:
//   kBlockRows, kBlockPanels    rows and panels of a block of sums
//   kWideRows    up to so many rows, and one panel, are a block too, and codes widened on their way; 0: never
//   kMostCodeRows    up to so many rows codes are multiplied as they are, by kCodeRows rows at a time

#if defined(__AVX512VNNI__)

using Quad = __m512i;
using Pair = __m512i;
using Products = __m512i;
struct Group {
  __m512i multiplier, offset;
};
inline Quad load_quad(const int8_t* p) { return _mm512_loadu_si512(p); }
inline void store_quad(int8_t* p, Quad v) { _mm512_storeu_si512(p, v); }
inline Pair load_pair(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Quad low(Pair v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Quad high(Pair v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline Group load_group(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i fours = _mm512_shuffle_epi8(bytes, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
  const __m512i multiplier = _mm512_and_si512(fours, _mm512_set1_epi16(15));
  return {multiplier, _mm512_mullo_epi16(high(fours), multiplier)};
}
inline Quad widen(Quad codes, const Group& g) { return _mm512_sub_epi8(_mm512_mullo_epi16(codes, g.multiplier), g.offset); }
// The instruction wants one side unsigned: weights are raised by 128, and the sums start lower.
// Rows that are computed only to fill a block may have any sum: hence the unsigned product.
inline Products start(int32_t sum_of_x) { return _mm512_set1_epi32(static_cast<int32_t>(-128u * static_cast<uint32_t>(sum_of_x))); }
inline Quad prepared(Quad w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
inline Group prepared(const Group& g) { return {g.multiplier, _mm512_add_epi8(g.offset, _mm512_set1_epi8(-128))}; }
inline void add(Products& sums, Quad prepared_w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  sums = _mm512_dpbusd_epi32(sums, prepared_w, _mm512_set1_epi32(four));
}
inline void store_products(int32_t* p, Products v) { _mm512_storeu_si512(p, v); }
constexpr int kBlockRows = 8, kBlockPanels = 2, kWideRows = 16;

// Of four quads they are at most 4 * 4 * 15 * 127, which fits 16 bits: a multiplication of halves then does, and adds in one.
using Dots = __m512i;
constexpr int64_t kRunPairs = 2;
struct CodeGroup {
  __m512i multiplier, offset;
};
inline CodeGroup load_code_group(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i multiplier = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
  return {multiplier, _mm512_mullo_epi16(_mm512_srli_epi32(bytes, 4), multiplier)};
}
inline Dots no_dots() { return _mm512_setzero_si512(); }
inline void add_codes(Dots& dots, Quad first, Quad second, const int8_t* x) {
  add(dots, first, x);
  add(dots, second, x + kQuad);
}
inline Products no_products() { return _mm512_setzero_si512(); }
inline void subtract_offset(Products& sums, const CodeGroup& g, int32_t sum_of_x) {
  sums = _mm512_sub_epi32(sums, _mm512_mullo_epi32(g.offset, _mm512_set1_epi32(sum_of_x)));
}
inline void add_dots(Products& sums, const Dots& dots, const CodeGroup& g) { sums = _mm512_dpwssd_epi32(sums, dots, g.multiplier); }
constexpr int kCodeRows = 3, kMostCodeRows = 3;

#elif defined(__AVX2__)

struct Quad {
  __m256i half[2];
};
using Pair = Quad;
using Products = Quad;
struct Group {
  Quad multiplier, offset;
};
inline Quad load_quad(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void store_quad(void* p, const Quad& v) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, v.half[0]);
  _mm256_storeu_si256(q + 1, v.half[1]);
}
inline Pair load_pair(const uint8_t* p) { return load_quad(p); }
inline __m256i low(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline __m256i high(__m256i v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
inline Quad low(const Pair& v) { return {low(v.half[0]), low(v.half[1])}; }
inline Quad high(const Pair& v) { return {high(v.half[0]), high(v.half[1])}; }
inline Group load_group(const uint8_t* p) {
  Group g;
  for (int i = 0; i < 2; ++i) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
    const __m256i fours = _mm256_shuffle_epi8(bytes, _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    g.multiplier.half[i] = _mm256_and_si256(fours, _mm256_set1_epi16(15));
    g.offset.half[i] = _mm256_mullo_epi16(high(fours), g.multiplier.half[i]);
  }
  return g;
}
inline Quad widen(const Quad& codes, const Group& g) {
  Quad w;
  for (int i = 0; i < 2; ++i)
    w.half[i] = _mm256_sub_epi8(_mm256_mullo_epi16(codes.half[i], g.multiplier.half[i]), g.offset.half[i]);
  return w;
}
inline Products start(int32_t) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Quad prepared(const Quad& w) { return w; }
inline Group prepared(const Group& g) { return g; }
// The instruction wants one side unsigned: the magnitudes of the weights, 128 among them, and their signs go to x. Pairs of products
// stay within 16 bits, for x is within +-127.
inline void add(Products& sums, const Quad& w, const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  const __m256i xs = _mm256_set1_epi32(four);
  for (int i = 0; i < 2; ++i) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.half[i]), _mm256_sign_epi8(xs, w.half[i]));
    sums.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
}
inline void store_products(int32_t* p, const Products& v) { store_quad(p, v); }
constexpr int kBlockRows = 4, kBlockPanels = 1, kWideRows = 0;

// Sums of pairs in 16 bits: of eight quads they are at most 8 * 2 * 15 * 127.
using Dots = Quad;
constexpr int64_t kRunPairs = 4;
struct CodeGroup {
  Quad multiplier, offset;  // 16 and 32 bits
};
inline CodeGroup load_code_group(const uint8_t* p) {
  CodeGroup g;
  for (int i = 0; i < 2; ++i) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
    const __m256i multiplier = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
    g.multiplier.half[i] = _mm256_or_si256(multiplier, _mm256_slli_epi32(multiplier, 16));
    g.offset.half[i] = _mm256_mullo_epi16(_mm256_srli_epi32(bytes, 4), multiplier);
  }
  return g;
}
inline Dots no_dots() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline void add_codes(Dots& dots, const Quad& first, const Quad& second, const int8_t* x) {
  int32_t four[2];
  __builtin_memcpy(four, x, sizeof four);
  for (int i = 0; i < 2; ++i) {
    dots.half[i] = _mm256_add_epi16(dots.half[i], _mm256_maddubs_epi16(first.half[i], _mm256_set1_epi32(four[0])));
    dots.half[i] = _mm256_add_epi16(dots.half[i], _mm256_maddubs_epi16(second.half[i], _mm256_set1_epi32(four[1])));
  }
}
inline Products no_products() { return no_dots(); }
inline void subtract_offset(Products& sums, const CodeGroup& g, int32_t sum_of_x) {
  for (int i = 0; i < 2; ++i)
    sums.half[i] = _mm256_sub_epi32(sums.half[i], _mm256_mullo_epi32(g.offset.half[i], _mm256_set1_epi32(sum_of_x)));
}
inline void add_dots(Products& sums, const Dots& dots, const CodeGroup& g) {
  for (int i = 0; i < 2; ++i) sums.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(dots.half[i], g.multiplier.half[i]));
}
constexpr int kCodeRows = 2, kMostCodeRows = 4;

#else

struct Quad {
  int8_t value[kQuadBytes];
};
using Pair = Quad;
struct Products {
  int32_t value[kPanelWidth];
};
struct Group {
  int8_t multiplier[kPanelWidth], zero_point[kPanelWidth];
};
inline Quad load_quad(const int8_t* p) {
  Quad v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store_quad(int8_t* p, const Quad& v) { __builtin_memcpy(p, &v, sizeof v); }
inline Pair load_pair(const uint8_t* p) { return load_quad(reinterpret_cast<const int8_t*>(p)); }
inline Quad low(const Pair& v) {
  Quad codes;
  for (int i = 0; i < kQuadBytes; ++i) codes.value[i] = static_cast<int8_t>(v.value[i] & 15);
  return codes;
}
inline Quad high(const Pair& v) {
  Quad codes;
  for (int i = 0; i < kQuadBytes; ++i) codes.value[i] = static_cast<int8_t>(v.value[i] >> 4 & 15);
  return codes;
}
inline Group load_group(const uint8_t* p) {
  Group g;
  for (int n = 0; n < kPanelWidth; ++n)
    g.multiplier[n] = static_cast<int8_t>(p[n] & 15), g.zero_point[n] = static_cast<int8_t>(p[n] >> 4);
  return g;
}
inline Quad widen(const Quad& codes, const Group& g) {
  Quad w;
  for (int i = 0; i < kQuadBytes; ++i)
    w.value[i] = static_cast<int8_t>((codes.value[i] - g.zero_point[i / kQuad]) * g.multiplier[i / kQuad]);
  return w;
}
inline Products start(int32_t) { return {}; }
inline Quad prepared(const Quad& w) { return w; }
inline Group prepared(const Group& g) { return g; }
inline void add(Products& sums, const Quad& w, const int8_t* x) {
  for (int i = 0; i < kQuadBytes; ++i) sums.value[i / kQuad] += w.value[i] * x[i % kQuad];
}
inline void store_products(int32_t* p, const Products& v) { __builtin_memcpy(p, &v, sizeof v); }
constexpr int kBlockRows = 4, kBlockPanels = 1, kWideRows = 0;

using Dots = Products;
constexpr int64_t kRunPairs = 4;
using CodeGroup = Group;
inline CodeGroup load_code_group(const uint8_t* p) { return load_group(p); }
inline Dots no_dots() { return {}; }
inline void add_codes(Dots& dots, const Quad& first, const Quad& second, const int8_t* x) {
  add(dots, first, x);
  add(dots, second, x + kQuad);
}
inline Products no_products() { return {}; }
// Weights that are none of the format's may overflow; that must be as harmless as in registers.
inline int32_t wrapped(int64_t v) { return static_cast<int32_t>(static_cast<uint32_t>(v)); }
inline void subtract_offset(Products& sums, const CodeGroup& g, int32_t sum_of_x) {
  for (int n = 0; n < kPanelWidth; ++n)
    sums.value[n] = wrapped(sums.value[n] - int64_t{g.multiplier[n] * g.zero_point[n]} * sum_of_x);
}
inline void add_dots(Products& sums, const Dots& dots, const CodeGroup& g) {
  for (int n = 0; n < kPanelWidth; ++n) sums.value[n] = wrapped(sums.value[n] + int64_t{g.multiplier[n]} * dots.value[n]);
}
constexpr int kCodeRows = 4, kMostCodeRows = 8;

#endif

}  // namespace qwenrt::QWENRT_ISA

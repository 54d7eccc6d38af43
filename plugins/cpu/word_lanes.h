// Products of 16-bit words in the registers that the including file is compiled for: include after defining QWENRT_ISA.
#pragma once

#include <cstring>

#include "rounding.h"

namespace qwenrt::QWENRT_ISA {
namespace {

constexpr int32_t kMostWord = 32767;  // as many below 0
constexpr int64_t kWordLanes = 2 * kLanes;
typedef int16_t Words __attribute__((vector_size(sizeof(Floats))));
typedef int8_t Bytes __attribute__((vector_size(kWordLanes)));

// Columns of a row of words, of which those beyond head_dim are 0.
int64_t word_columns(int64_t width) { return (width + kWordLanes - 1) / kWordLanes * kWordLanes; }

Words load_words(const int16_t* p) {
  Words v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
Words load_words(const int8_t* p) {
  Bytes v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Words);
}
void store_words(int16_t* p, Words v) { std::memcpy(p, &v, sizeof v); }
void store_words(int16_t* p, Ints v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), as_words(v));
#else
  typedef int16_t HalfWords __attribute__((vector_size(sizeof(Floats) / 2)));
  const HalfWords words = __builtin_convertvector(v, HalfWords);
  std::memcpy(p, &words, sizeof words);
#endif
}
Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Two words in each lane of 32 bits.
Words broadcast_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return (Words)(Ints{} + pair);
}

// p[0..3] = the sums of the lanes of a, ..., d.
#if defined(__AVX512F__) || defined(__AVX2__)

void store_sums(float* p, __m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  _mm_storeu_ps(p, _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1))));
}

#endif
#if defined(__AVX512F__)

__m256i half_sums(Ints v) { return _mm256_add_epi32(_mm512_castsi512_si256((__m512i)v), _mm512_extracti64x4_epi64((__m512i)v, 1)); }
void store_sums(float* p, Ints a, Ints b, Ints c, Ints d) { store_sums(p, half_sums(a), half_sums(b), half_sums(c), half_sums(d)); }

#elif defined(__AVX2__)

void store_sums(float* p, Ints a, Ints b, Ints c, Ints d) { store_sums(p, (__m256i)a, (__m256i)b, (__m256i)c, (__m256i)d); }

#else

void store_sums(float* p, Ints a, Ints b, Ints c, Ints d) {
  int32_t sums[4] = {};
  for (int i = 0; i < kLanes; ++i) sums[0] += a[i], sums[1] += b[i], sums[2] += c[i], sums[3] += d[i];
  for (int i = 0; i < 4; ++i) p[i] = static_cast<float>(sums[i]);
}

#endif

// V of two keys, a pair of words for each of kWordLanes columns; which lane has which column, `in_order` knows.
struct Pairs {
  Words first, second;
};

// add_products: sum + the products of two pairs of words in each lane.
#if defined(__AVX512F__)

Ints add_products(Ints sum, Words a, Words b) { return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
Pairs interleave(const int8_t* even, const int8_t* odd) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd));
  return {(Words)_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(a, b)), (Words)_mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(a, b))};
}
void in_order(Floats& first, Floats& second) {
  const Floats low = _mm512_shuffle_f32x4(first, second, 0x44);
  second = _mm512_shuffle_f32x4(first, second, 0xee);
  first = low;
}

#elif defined(__AVX2__)

Ints add_products(Ints sum, Words a, Words b) { return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
Pairs interleave(const int8_t* even, const int8_t* odd) {
  const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even));
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd));
  return {(Words)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), (Words)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
}
void in_order(Floats&, Floats&) {}

#else

Ints add_products(Ints sum, Words a, Words b) {
  // In lanes that are not used sums may overflow; that must be as harmless as in registers.
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t first = static_cast<uint32_t>(a[2 * i] * b[2 * i]), second = static_cast<uint32_t>(a[2 * i + 1] * b[2 * i + 1]);
    sum[i] = static_cast<int32_t>(static_cast<uint32_t>(sum[i]) + first + second);
  }
  return sum;
}
Pairs interleave(const int8_t* even, const int8_t* odd) {
  Pairs v;
  for (int i = 0; i < kLanes; ++i) {
    v.first[2 * i] = even[i], v.first[2 * i + 1] = odd[i];
    v.second[2 * i] = even[kLanes + i], v.second[2 * i + 1] = odd[kLanes + i];
  }
  return v;
}
void in_order(Floats&, Floats&) {}

#endif

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

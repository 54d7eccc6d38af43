// A vector of floats in the widest registers that the including file is compiled for. Everything lies in namespace QWENRT_ISA, so
// that the linker never takes one instruction set's copy of an inline function for another's.
#pragma once

#include <cstdint>
#include <cstring>

#include "element_type.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace qwenrt::QWENRT_ISA {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float to_float(float value) { return value; }

inline float to_float(int8_t value) { return value; }

inline float to_float(BFloat16 value) { return from_bits(uint32_t{value.bits} << 16); }

// Subnormals become normal floats, infinities and NaNs stay what they are.
inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, exponent = (value.bits >> 10) & 0x1f;
  const uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return from_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
}

// Rounds to nearest even; what is too large becomes infinite.
inline Float16 to_float16(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's fraction in the last bits
    half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using Floats = __m512;
inline Floats broadcast(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
inline Floats load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Floats load(const BFloat16* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline void store(Float16* p, Floats v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline __m128 quarter_sums(Floats v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float largest(Floats v) { return _mm512_reduce_max_ps(v); }

// p[0..3] = sum(a), ..., sum(d), with the additions in the same order.
inline void store_sums(float* p, Floats a, Floats b, Floats c, Floats d) {
  const Floats ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const Floats cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  Floats quarters = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  quarters = _mm512_add_ps(quarters, _mm512_permute_ps(quarters, 0x4e));
  quarters = _mm512_add_ps(quarters, _mm512_permute_ps(quarters, 0xb1));
  const __m512i first_of_each = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
  _mm_storeu_ps(p, _mm512_castps512_ps128(_mm512_permutexvar_ps(first_of_each, quarters)));
}

#elif defined(__AVX2__)

constexpr int kLanes = 8;
using Floats = __m256;
inline Floats broadcast(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
inline Floats load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Floats load(const BFloat16* p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline void store(Float16* p, Floats v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline __m128 quarter_sums(Floats v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
inline float largest(Floats v) {
  __m128 top = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  top = _mm_max_ps(top, _mm_movehl_ps(top, top));
  return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
}

// p[0..3] = sum(a), ..., sum(d), with the additions in the same order.
inline void store_sums(float* p, Floats a, Floats b, Floats c, Floats d) {
  const __m128 qa = quarter_sums(a), qb = quarter_sums(b), qc = quarter_sums(c), qd = quarter_sums(d);
  const __m128 ab = _mm_add_ps(_mm_movelh_ps(qa, qb), _mm_movehl_ps(qb, qa));
  const __m128 cd = _mm_add_ps(_mm_movelh_ps(qc, qd), _mm_movehl_ps(qd, qc));
  _mm_storeu_ps(p, _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xdd)));
}

#else

constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(16)));
inline Floats broadcast(float x) { return Floats{x, x, x, x}; }
inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
Floats load(const T* p) {
  return Floats{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
inline void store(Float16* p, Floats v) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_float16(v[i]);
}
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline float largest(Floats v) {
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
}
inline float sum(Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline void store_sums(float* p, Floats a, Floats b, Floats c, Floats d) {
  p[0] = sum(a), p[1] = sum(b), p[2] = sum(c), p[3] = sum(d);
}

#endif

#if defined(__AVX512F__) || defined(__AVX2__)

inline float sum(Floats v) {
  __m128 quarter = quarter_sums(v);
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

#endif

typedef int32_t Ints __attribute__((vector_size(sizeof(Floats))));
typedef uint32_t Bits __attribute__((vector_size(sizeof(Floats))));

inline Floats zero() { return broadcast(0); }

template <int Value>
struct Count {
  static constexpr int value = Value;
};

// Calls work(Count<n>, first) for blocks of n of [first, last), Most while there are so many.
template <int Most, class Work>
void in_blocks(int64_t first, int64_t last, const Work& work) {
  for (; first + Most <= last; first += Most) work(Count<Most>{}, first);
  if constexpr (Most > 1) in_blocks<Most - 1>(first, last, work);
}

// e^x for x <= 0 within 2 units in the last place; 0 below -87, NaN for NaN. x = n log 2 + r with |r| <= log(2) / 2, e^r by its
// Taylor polynomial, 2^n by the exponent field.
inline Floats exp_of_negative(Floats x) {
  const Floats kRound = broadcast(0x1.8p23f);
  const Floats shifted = multiply_add(x, broadcast(0x1.715476p0f), kRound);
  const Floats n = shifted - kRound;
  const Floats high = multiply_add(n, broadcast(-0x1.62e400p-1f), x);
  const Floats r = multiply_add(n, broadcast(-0x1.7f7d1cp-20f), high);
  Floats p = broadcast(1.0f / 5040);
  p = multiply_add(p, r, broadcast(1.0f / 720));
  p = multiply_add(p, r, broadcast(1.0f / 120));
  p = multiply_add(p, r, broadcast(1.0f / 24));
  p = multiply_add(p, r, broadcast(1.0f / 6));
  p = multiply_add(p, r, broadcast(0.5f));
  p = multiply_add(p, r, broadcast(1));
  p = multiply_add(p, r, broadcast(1));
  // What overflows here is below -87, and masked out.
  const Floats scaled = (Floats)((Bits)p + ((Bits)shifted << 23));
  const Floats result = (Floats)((Ints)scaled & ~(Ints)(x < broadcast(-87)));
  return x == x ? result : x;
}

}  // namespace qwenrt::QWENRT_ISA

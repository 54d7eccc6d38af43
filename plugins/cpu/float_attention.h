// Keys of floats for one instruction set: include after defining QWENRT_ISA.
#pragma once

#include "attention_tile.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// To the first-level cache, which has too few places for all that is on its way from memory.
constexpr int64_t kNearKeys = 8;

// Calls for `width` elements, from `column` on, of what comes after rows[0].
template <class T>
void prefetch_ahead(const T* const* rows, int64_t column, int64_t width) {
  const char* far = reinterpret_cast<const char*>(rows[kFarKeys] + column);
  const char* near = reinterpret_cast<const char*>(rows[kNearKeys] + column);
  for (int64_t i = 0; i < width * int64_t{sizeof(T)}; i += 64) {
    __builtin_prefetch(far + i, 0, 2);
    __builtin_prefetch(near + i, 0, 3);
  }
}

// scores[m][n] = q[m] . k[n] for one micro tile; each sum runs over head_dim in the same order whatever the tile.
template <int Rows, class T>
void score_micro_tile(const float* q, const T* const* k, int64_t width, float* scores) {
  Floats sums[Rows][kMicroKeys];
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < kMicroKeys; ++n) sums[m][n] = zero();
  for (int64_t d = 0; d < width; d += kLanes) {
    Floats qs[Rows];
    for (int m = 0; m < Rows; ++m) qs[m] = load(q + m * width + d);
    for (int n = 0; n < kMicroKeys; ++n) {
      const Floats key = load(k[n] + d);
      for (int m = 0; m < Rows; ++m) sums[m][n] = multiply_add(qs[m], key, sums[m][n]);
    }
  }
  for (int m = 0; m < Rows; ++m) store_sums(scores + m * kTileKeys, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

template <class T>
float score(const float* q, const T* k, int64_t width) {
  Floats total = zero();
  for (int64_t d = 0; d < width; d += kLanes) total = multiply_add(load(q + d), load(k + d), total);
  return sum(total);
}

// scores of `rows` rows against keys [first, last) of a tile; `k` holds a pointer for each key of it, and for what comes after. That is
// called for meanwhile where rows are few: they are done with a key before the next one could come. Of many rows, some stay in the
// first-level cache while the tile passes by.
template <class T>
void score_tile(const float* q, int64_t rows, const T* const* k, int64_t first, int64_t last, int64_t width, float* scores) {
  const int64_t whole = first + (last - first) / kMicroKeys * kMicroKeys;
  const auto score_rows = [&](auto count, int64_t m, int64_t key) {
    score_micro_tile<count.value>(q + m * width, k + key, width, scores + m * kTileKeys + key);
  };
  if (rows <= kFewRows) {
    for (int64_t key = first; key < whole; key += kMicroKeys) {
      for (int n = 0; n < kMicroKeys; ++n) prefetch_ahead(k + key + n, 0, width);
      in_blocks<kMicroRows>(0, rows, [&](auto count, int64_t m) { score_rows(count, m, key); });
    }
  } else {
    in_blocks<kMicroRows>(0, rows, [&](auto count, int64_t m) {
      for (int64_t key = first; key < whole; key += kMicroKeys) score_rows(count, m, key);
    });
  }
  for (int64_t key = whole; key < last; ++key)
    for (int64_t m = 0; m < rows; ++m) scores[m * kTileKeys + key] = score(q + m * width, k[key], width);
}

// values[m] = values[m] * keep[m] + the sum over keys [first, last) of weight * v, for Vectors vectors of head_dim.
template <int Rows, int Vectors, bool Prefetch, class T>
void weigh_micro_tile(const float* weights, const float* keep, const T* const* v, int64_t first, int64_t last, int64_t column,
                      int64_t width, float* values) {
  Floats sums[Rows][Vectors];
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < Vectors; ++n) sums[m][n] = load(values + m * width + n * kLanes) * broadcast(keep[m]);
  for (int64_t key = first; key < last; ++key) {
    const T* row = v[key] + column;
    if constexpr (Prefetch) prefetch_ahead(v + key, column, Vectors * kLanes);
    Floats factor[Rows];
    for (int m = 0; m < Rows; ++m) factor[m] = broadcast(weights[m * kTileKeys + key]);
    for (int n = 0; n < Vectors; ++n) {
      const Floats value = load(row + n * kLanes);
      for (int m = 0; m < Rows; ++m) sums[m][n] = multiply_add(factor[m], value, sums[m][n]);
    }
  }
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < Vectors; ++n) store(values + m * width + n * kLanes, sums[m][n]);
}

template <int Rows, int Vectors, class T>
void weigh_columns(const float* weights, const float* keep, int64_t rows, const T* const* v, int64_t first, int64_t last,
                   int64_t column, int64_t width, float* values) {
  in_blocks<Rows>(0, rows, [&](auto count, int64_t m) {
    if (m == 0 && rows <= kFewRows) {
      weigh_micro_tile<count.value, Vectors, true>(weights, keep, v, first, last, column, width, values);
    } else {
      weigh_micro_tile<count.value, Vectors, false>(weights + m * kTileKeys, keep + m, v, first, last, column, width, values + m * width);
    }
  });
}

// Of one or two rows all sums that registers hold, so that V is read in the order in which it lies; of more, each V for as many rows as may be.
template <class T>
void weigh_tile(const float* weights, const float* keep, int64_t rows, const T* const* v, int64_t first, int64_t last, int64_t width,
                float* values) {
  constexpr int kVectors = 4, kMostVectors = kLanes == 16 ? 8 : 4;
  int64_t d = 0;
  if (rows <= 2)
    for (; d + kMostVectors * kLanes <= width; d += kMostVectors * kLanes)
      weigh_columns<2, kMostVectors>(weights, keep, rows, v, first, last, d, width, values + d);
  for (; d + kVectors * kLanes <= width; d += kVectors * kLanes)
    weigh_columns<kMicroRows, kVectors>(weights, keep, rows, v, first, last, d, width, values + d);
  for (; d < width; d += kLanes) weigh_columns<kMicroRows, 1>(weights, keep, rows, v, first, last, d, width, values + d);
}

// Adds keys [first, last) of a tile to the sums of rows [row, row + rows), all of which see all of them.
template <class T>
void add_keys(const Scratch& s, int64_t row, int64_t rows, const Keys<T>& keys, int64_t first, int64_t last, int64_t width) {
  float* scores = s.scores + row * kTileKeys;
  score_tile(s.q + row * width, rows, keys.k, first, last, width, scores);
  for (int64_t m = 0; m < rows; ++m)
    soften(scores + m * kTileKeys, first, last, s.chunk.largest[row + m], s.chunk.weights[row + m], s.keep[row + m]);
  weigh_tile(scores, s.keep + row, rows, keys.v, first, last, width, s.chunk.values + row * width);
}

void convert_row(const Float16* from, int64_t width, float* to) {
  for (int64_t d = 0; d < width; d += kLanes) store(to + d, load(from + d));
}

// Keys [first, last) of a tile in float32, in scratch memory.
Keys<float> widen(const Keys<Float16>& keys, int64_t first, int64_t last, int64_t width, const Scratch& s) {
  Keys<float> wide;
  for (int64_t i = first; i < last; ++i) {
    wide.k[i] = s.k + i * width;
    wide.v[i] = s.v + i * width;
    prefetch_ahead(keys.k + i, 0, width);
    prefetch_ahead(keys.v + i, 0, width);
    convert_row(keys.k[i], width, s.k + i * width);
    convert_row(keys.v[i], width, s.v + i * width);
  }
  repeat_last(wide, last, 0);
  return wide;
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

// Keys of int8 for one instruction set: include after defining QWENRT_ISA.
//
// q, and in each tile of keys a row's weights times what V is multiples of, are rounded to 16 bits, an error of 1 / 65534 of the largest of them at
// most. Their products with int8 then add up exactly, so that tiles may be worked through in whatever order is the fastest; and an instruction does
// twice as many as of floats.
#pragma once

#include <cstring>

#include "attention_tile.h"
#include "word_lanes.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// Calls for `width` integers, from `column` on, of what comes after rows[0], and for as many bytes behind them as the float of a row has: where a
// block ends, it lies in a line that nothing else calls for. Out of the second-level cache such short rows come in time by themselves.
void prefetch_ahead(const int8_t* const* rows, int64_t column, int64_t width) {
  const int8_t* far = rows[kFarKeys] + column;
  for (int64_t i = 0; i < width + int64_t{sizeof(float)}; i += 64) __builtin_prefetch(far + i, 0, 2);
}

// What K or V of keys [first, last) are multiples of; 0 for the rest of the tile.
struct KeyUnits {
  float of[kTileKeys] = {};

  KeyUnits(const int8_t* const* rows, int64_t first, int64_t last, int64_t width) {
    for (int64_t key = first; key < last; ++key) std::memcpy(of + key, rows[key] + width, sizeof(float));
  }
};

// Where Count bytes of a row lie from `column` on: in a copy of them, if the row ends before.
template <int64_t Count>
const int8_t* bytes_of(const int8_t* row, int64_t column, int64_t width, int8_t (&copy)[Count]) {
  if (column + Count <= width) return row + column;
  std::memcpy(copy, row + column, static_cast<size_t>(width - column));
  return copy;
}

// A row's values * keep + the sums of kWordLanes columns, from `column` on, in multiples of `unit`.
void add_weighted(Ints first, Ints second, float unit, float keep, int64_t column, int64_t width, float* values) {
  Floats sums[2] = {to_floats(first), to_floats(second)};
  in_order(sums[0], sums[1]);
  for (int half = 0; half < 2; ++half, column += kLanes)
    if (column < width)
      store(values + column, multiply_add(sums[half], broadcast(unit), load(values + column) * broadcast(keep)));
}

// A tile of keys where they lie in the pool, for few rows. Padded: head_dim does not fill the registers.
template <bool Padded>
struct PoolTile {
  const Keys<int8_t>& keys;
  int64_t width;

  Words k(int64_t key, int64_t column) const {
    if constexpr (!Padded) return load_words(keys.k[key] + column);
    int8_t copy[kWordLanes] = {};
    return load_words(bytes_of(keys.k[key], column, width, copy));
  }
  Pairs v(int64_t pair, int64_t column) const {
    const int8_t *even = keys.v[2 * pair], *odd = keys.v[2 * pair + 1];
    if constexpr (!Padded) return interleave(even + column, odd + column);
    int8_t copies[2][kWordLanes] = {};
    return interleave(bytes_of(even, column, width, copies[0]), bytes_of(odd, column, width, copies[1]));
  }
};

// What fills up a block of keys is multiplied too, and not used: all that matters is that something lies there.
void repeat_first(Keys<int8_t>& keys, int64_t first) {
  for (int64_t key = 0; key < first; ++key) keys.k[key] = keys.k[first], keys.v[key] = keys.v[first];
}

// scores[m][n] = q[m] . k[n], in units of both, for 4 keys.
template <int Rows, class Tile>
void score_micro_tile(const int16_t* q, const Tile& tile, int64_t key, int64_t columns, float* scores) {
  Ints sums[Rows][kMicroKeys];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < kMicroKeys; ++n) sums[m][n] = Ints{};
  for (int64_t d = 0; d < columns; d += kWordLanes) {
    Words qs[Rows];
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) qs[m] = load_words(q + m * columns + d);
#pragma GCC unroll 8
    for (int n = 0; n < kMicroKeys; ++n) {
      const Words k = tile.k(key + n, d);
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) sums[m][n] = add_products(sums[m][n], qs[m], k);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m) store_sums(scores + m * kTileKeys, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

// Of keys [first, last), and of what fills up their blocks.
template <class Tile>
void score_tile(const int16_t* q, int64_t rows, const Tile& tile, int64_t first, int64_t last, int64_t columns, float* scores) {
  for (int64_t key = first / kMicroKeys * kMicroKeys; key < last; key += kMicroKeys) {
    for (int n = 0; n < kMicroKeys; ++n) prefetch_ahead(tile.keys.k + key + n, 0, tile.width);
    in_blocks<kMicroRows>(0, rows, [&](auto count, int64_t m) {
      score_micro_tile<count.value>(q + m * columns, tile, key, columns, scores + m * kTileKeys + key);
    });
  }
}

// Turns weights into words, as factors of V's integers; returns what they are multiples of.
float round_weights(const float* weights, const KeyUnits& v_units, int16_t* words) {
  float factors[kTileKeys];
  for (int64_t key = 0; key < kTileKeys; key += kLanes) store(factors + key, load(weights + key) * load(v_units.of + key));
  std::memset(words, 0, kTileKeys * sizeof *words);
  return round_values(factors, kTileKeys, kMostWord, [&](int64_t key, const Ints& whole) { store_words(words + key, whole); });
}

// values[m] = values[m] * keep[m] + unit[m] * the sum over keys [first, last) of weight * v, for Blocks times kWordLanes columns.
template <int Rows, int Blocks, class Tile>
void weigh_micro_tile(const int16_t* weights, const float* units, const float* keep, const Tile& tile, int64_t first, int64_t last,
                      int64_t column, float* values) {
  Ints sums[Rows][2 * Blocks];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < 2 * Blocks; ++n) sums[m][n] = Ints{};
  for (int64_t pair = first / 2; 2 * pair < last; ++pair) {
    for (int64_t key = 2 * pair; key < 2 * pair + 2; ++key) prefetch_ahead(tile.keys.v + key, column, Blocks * kWordLanes);
    Words factors[Rows];
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) factors[m] = broadcast_pair(weights + m * kTileKeys + 2 * pair);
#pragma GCC unroll 8
    for (int n = 0; n < Blocks; ++n) {
      const Pairs v = tile.v(pair, column + n * kWordLanes);
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) {
        sums[m][2 * n] = add_products(sums[m][2 * n], factors[m], v.first);
        sums[m][2 * n + 1] = add_products(sums[m][2 * n + 1], factors[m], v.second);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < Blocks; ++n)
      add_weighted(sums[m][2 * n], sums[m][2 * n + 1], units[m], keep[m], column + n * kWordLanes, tile.width, values + m * tile.width);
}

// Of one or two rows all sums that registers hold, so that V is read in the order in which it lies; of more, each V for 4 rows.
template <class Tile>
void weigh_tile(const int16_t* weights, const float* units, const float* keep, int64_t rows, const Tile& tile, int64_t first,
                int64_t last, float* values) {
  const auto weigh_columns = [&](auto most, auto blocks, int64_t d) {
    in_blocks<most.value>(0, rows, [&](auto count, int64_t m) {
      weigh_micro_tile<count.value, blocks.value>(weights + m * kTileKeys, units + m, keep + m, tile, first, last, d,
                                                  values + m * tile.width);
    });
  };
  constexpr int kBlocks = kLanes == 16 ? 4 : 2;
  int64_t d = 0;
  if (rows <= 2)
    for (; d + kBlocks * kWordLanes <= tile.width; d += kBlocks * kWordLanes) weigh_columns(Count<2>{}, Count<kBlocks>{}, d);
  for (; d + kBlocks / 2 * kWordLanes <= tile.width; d += kBlocks / 2 * kWordLanes) weigh_columns(Count<4>{}, Count<kBlocks / 2>{}, d);
  for (; d < tile.width; d += kWordLanes) weigh_columns(Count<4>{}, Count<1>{}, d);
}

// The largest word of q: products with a whole row of int8 add up to less than 2^31.
int32_t most_of_query(int64_t width) { return static_cast<int32_t>(kMostWord * int64_t{512} / greater(width, 512)); }

// A row of q, to its words, which are zeros, and its unit.
void round_query(const float* q, int64_t width, int64_t row, const Scratch& s) {
  const int64_t columns = word_columns(width);
  int16_t* words = s.q_words + row * columns;
  s.q_units[row] = round_values(q, width, most_of_query(width), [&](int64_t d, const Ints& whole) { store_words(words + d, whole); });
}

// Adds keys [first, last) of a tile to the sums of rows [row, row + rows), all of which see all of them.
template <bool Padded>
void add_keys(const Scratch& s, int64_t row, int64_t rows, const PoolTile<Padded>& tile, int64_t first, int64_t last, int64_t width) {
  const int64_t columns = word_columns(width);
  float* scores = s.scores + row * kTileKeys;
  score_tile(s.q_words + row * columns, rows, tile, first, last, columns, scores);
  int16_t* weights = s.weights + row * kTileKeys;
  const KeyUnits k_units(tile.keys.k, first, last, width), v_units(tile.keys.v, first, last, width);
  for (int64_t m = 0; m < rows; ++m) {
    float* row_scores = scores + m * kTileKeys;
    for (int64_t key = 0; key < kTileKeys; key += kLanes)
      store(row_scores + key, load(row_scores + key) * (load(k_units.of + key) * broadcast(s.q_units[row + m])));
    soften(row_scores, first, last, s.chunk.largest[row + m], s.chunk.weights[row + m], s.keep[row + m]);
    s.weight_units[row + m] = round_weights(row_scores, v_units, weights + m * kTileKeys);
  }
  weigh_tile(weights, s.weight_units + row, s.keep + row, rows, tile, first, last, s.chunk.values + row * width);
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

// Keys of int8 and many rows of q, for one instruction set: include after defining QWENRT_ISA. Rows of q are lanes, so that softmax needs no
// sums across them. Integers add up exactly and floats in the order of `soften`, so a row's bits are those of integer_attention.h.
#pragma once

#include "integer_attention.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// A tile in words. K: [kTileKeys, columns]. V: [kTileKeys / 2, columns] of two keys, in the order of Pairs.
struct WordTile {
  const int16_t *k, *v;
  int64_t columns;
  KeyUnits k_units, v_units;
};

WordTile widen(Keys<int8_t>& keys, int64_t first, int64_t last, int64_t width, const Scratch& s) {
  const int64_t columns = word_columns(width);
  int16_t *k = reinterpret_cast<int16_t*>(s.k), *v = reinterpret_cast<int16_t*>(s.v);
  repeat_first(keys, first);
  for (int64_t key = 0; key < kTileKeys; key += 2) {
    for (int64_t i = key; i < key + 2; ++i) {
      prefetch_ahead(keys.k + i, 0, width);
      prefetch_ahead(keys.v + i, 0, width);
    }
    for (int64_t d = 0; d < width; d += kWordLanes) {
      int8_t copies[4][kWordLanes] = {};
      store_words(k + key * columns + d, load_words(bytes_of(keys.k[key], d, width, copies[0])));
      store_words(k + (key + 1) * columns + d, load_words(bytes_of(keys.k[key + 1], d, width, copies[1])));
      const Pairs pairs = interleave(bytes_of(keys.v[key], d, width, copies[2]), bytes_of(keys.v[key + 1], d, width, copies[3]));
      store_words(v + key * columns + 2 * d, pairs.first);
      store_words(v + key * columns + 2 * d + kWordLanes, pairs.second);
    }
  }
  return {k, v, columns, KeyUnits(keys.k, first, last, width), KeyUnits(keys.v, first, last, width)};
}

// Rows of q as pairs of columns: [head_dim / 2, lane_rows(rows)], zeros but where `pair_query` puts integers. What lies beyond the last row is
// multiplied too, and not used.
int64_t lane_rows(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }
static_assert(2 * kFewIntegerRows >= kLanes, "more rows than that fit the memory of as many floats");

void pair_query(const float* q, int64_t width, int64_t row, int64_t rows, const Scratch& s) {
  int16_t* words = s.q_words + 2 * row;
  const int64_t apart = 2 * lane_rows(rows);
  s.q_units[row] = round_values(q, width, most_of_query(width), [&](int64_t d, const Ints& whole) {
    int16_t rounded[kLanes];
    store_words(rounded, whole);
    for (int64_t i = 0; i < kLanes; i += 2) std::memcpy(words + (d + i) / 2 * apart, rounded + i, 2 * sizeof *words);
  });
}

// sums[n] = the sum over `steps` of a pair of words of a, for all lanes, times pairs of b: a's are a_step apart, and those of the next n a_apart.
template <int Count, int Vectors>
void multiply_pairs(const int16_t* a, int64_t a_apart, int64_t a_step, const int16_t* b, int64_t b_step, int64_t steps,
                    Ints (&result)[Count][Vectors]) {
  Ints sums[Count][Vectors];
#pragma GCC unroll 8
  for (int n = 0; n < Count; ++n)
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; ++i) sums[n][i] = Ints{};
  for (; steps > 0; --steps, a += a_step, b += b_step) {
    Words bs[Vectors];
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; ++i) bs[i] = load_words(b + i * kWordLanes);
#pragma GCC unroll 8
    for (int n = 0; n < Count; ++n) {
      const Words pair = broadcast_pair(a + n * a_apart);
#pragma GCC unroll 8
      for (int i = 0; i < Vectors; ++i) sums[n][i] = add_products(sums[n][i], pair, bs[i]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < Count; ++n)
#pragma GCC unroll 8
    for (int i = 0; i < Vectors; ++i) result[n][i] = sums[n][i];
}
constexpr int kPairRows = kLanes == 16 ? 8 : 4;  // what registers hold of sums of two vectors

// Rows of one tile that are worked on together, as lanes.
constexpr int64_t kLaneBlock = 2 * kLanes;
struct LaneBlock {
  Ints scores[kTileKeys][2];
  int16_t weights[kTileKeys / 2][2 * kLaneBlock];  // pairs of keys
  float keep[kLaneBlock], units[kLaneBlock];
  int32_t from[kLaneBlock], to[kLaneBlock];  // the keys of the tile that a row sees
};

template <int Vectors>
void score_lanes(const int16_t* q, int64_t q_step, const WordTile& tile, int64_t width, LaneBlock& block) {
  for (int64_t key = 0; key < kTileKeys; key += kPairRows) {
    Ints sums[kPairRows][Vectors];
    multiply_pairs(tile.k + key * tile.columns, tile.columns, 2, q, q_step, width / 2, sums);
    for (int n = 0; n < kPairRows; ++n)
      for (int i = 0; i < Vectors; ++i) block.scores[key + n][i] = sums[n][i];
  }
}

Ints load_ints(const int32_t* p) {
  Ints v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The order in which `soften` adds up what lies in a row of registers.
Floats sum_in_order(Floats (&terms)[kTileKeys]) {
  for (int64_t key = kLanes; key < kTileKeys; ++key) terms[key % kLanes] = terms[key % kLanes] + terms[key];
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) terms[i] = terms[i] + terms[i + half];
  return terms[0];
}

// `soften` and `round_weights` of `count` rows from `row` on, the lanes of vector i.
void soften_lanes(const Scratch& s, int64_t row, int64_t count, const WordTile& tile, int i, LaneBlock& block) {
  const Floats q_units = load_first(s.q_units + row, count), old_top = load_first(s.chunk.largest + row, count);
  const Ints from = load_ints(block.from + i * kLanes), to = load_ints(block.to + i * kLanes);
  const auto sees = [&](int64_t key) { return (from <= static_cast<int32_t>(key)) & (to > static_cast<int32_t>(key)); };
  Floats weights[kTileKeys], top = old_top;
  for (int64_t key = 0; key < kTileKeys; ++key) {
    const Floats score = to_floats(block.scores[key][i]) * (broadcast(tile.k_units.of[key]) * q_units);
    weights[key] = sees(key) ? score : broadcast(-INFINITY);
    top = larger(top, weights[key]);
  }
  Floats factors[kTileKeys];
  Ints largest{};
  for (int64_t key = 0; key < kTileKeys; ++key) {
    weights[key] = exp_of_negative(weights[key] - top);
    // Where a key is not seen, V may be multiples of NaN.
    factors[key] = sees(key) ? weights[key] * broadcast(tile.v_units.of[key]) : zero();
    const Ints bits = (Ints)factors[key] & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  const Floats keep = exp_of_negative(old_top - top), round = broadcast(0x1.8p23f), most = broadcast(kMostWord);
  const Floats factor = largest < kSmallest ? zero() : most / (Floats)largest;
  for (int64_t key = 0; key < kTileKeys; key += 2) {
    const Ints even = (Ints)(factors[key] * factor + round) - (Ints)round;
    const Ints odd = (Ints)(factors[key + 1] * factor + round) - (Ints)round;
    const Ints pair = (even & 0xffff) | (Ints)((Bits)odd << 16);
    std::memcpy(block.weights[key / 2] + i * kWordLanes, &pair, sizeof pair);
  }
  const Floats unit = largest < kSmallest ? zero() : (Floats)largest / most;
  store(block.units + i * kLanes, largest >= kInfinity ? broadcast(from_bits(0x7fc00000)) : unit);
  store(block.keep + i * kLanes, keep);
  store_first(s.chunk.weights + row, load_first(s.chunk.weights + row, count) * keep + sum_in_order(weights), count);
  store_first(s.chunk.largest + row, top, count);
}

void weigh_lanes(const WordTile& tile, int64_t count, int64_t width, const LaneBlock& block, float* values) {
  in_blocks<kPairRows>(0, count, [&](auto rows, int64_t m) {
    for (int64_t d = 0; d < width; d += kWordLanes) {
      Ints sums[rows.value][2];
      multiply_pairs(block.weights[0] + 2 * m, 2, 2 * kLaneBlock, tile.v + 2 * d, 2 * tile.columns, kTileKeys / 2, sums);
      for (int n = 0; n < rows.value; ++n)
        add_weighted(sums[n][0], sums[n][1], block.units[m + n], block.keep[m + n], d, width, values + (m + n) * width);
    }
  });
}

// Adds keys [first, last) of the tile that starts at `start` to all rows of q, which are those of one KV head.
void add_widened_tile(const PagedAttention& op, const QueryTile& query, int64_t start, Keys<int8_t>& keys, int64_t first, int64_t last,
                      const Scratch& s) {
  const int64_t width = op.head_dim, group = op.group(), rows = query.count * group, end = query.position + query.count;
  const WordTile tile = widen(keys, first, last, width, s);
  // Positions that see some of it.
  const int64_t begin = greater(query.position, start);
  const bool window_ends = op.sliding_window > 0 && op.sliding_window < end - start;
  const int64_t stop = window_ends ? smaller(end, start + kTileKeys - 1 + op.sliding_window) : end;
  const int64_t last_row = (stop - query.position) * group;
  LaneBlock block;
  for (int64_t row = (begin - query.position) * group; row < last_row; row += kLaneBlock) {
    const int64_t count = smaller(last_row - row, kLaneBlock);
    for (int64_t m = 0; m < kLaneBlock; ++m) {
      const int64_t position = query.position + (row + m) / group;
      block.from[m] = static_cast<int32_t>(greater(op.first_key(position) - start, 0));
      block.to[m] = static_cast<int32_t>(smaller(position + 1 - start, kTileKeys));
    }
    const int16_t* q = s.q_words + 2 * row;
    (count > kLanes ? score_lanes<2> : score_lanes<1>)(q, 2 * lane_rows(rows), tile, width, block);
    for (int i = 0; i * kLanes < count; ++i) soften_lanes(s, row + i * kLanes, smaller(count - i * kLanes, kLanes), tile, i, block);
    weigh_lanes(tile, count, width, block, s.chunk.values + row * width);
  }
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

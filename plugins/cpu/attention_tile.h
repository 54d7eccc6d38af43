// A tile of keys and what rows of q gather from it, for one instruction set, whatever the pool is of: include after defining QWENRT_ISA. Uses
// nothing of the standard library that the linker could share with code for another instruction set.
#pragma once

#include <cmath>

#include "attention.h"
#include "isa.h"
#include "lanes.h"

namespace qwenrt::QWENRT_ISA {
namespace {

constexpr int64_t kMicroKeys = 4;  // a micro tile's sums fill the registers: 4 keys, or 4 vectors of V, by 3 rows or more
constexpr int64_t kMicroRows = kLanes == 16 ? 6 : 3;
constexpr int64_t kFarKeys = kTileKeys;  // K and V of so many keys ahead are called for, to the second-level cache

// What the tiles of a chunk, or the chunks of a context, add up to: sum of weight * V, not yet divided by the sum of the weights.
struct Sums {
  float* values;   // [rows, head_dim]
  float* largest;  // [rows]: the score that the weights are relative to
  float* weights;  // [rows]; nothing seen: 0
};

Sums sums_at(float* memory, int64_t rows, int64_t head_dim) {
  return {memory, memory + rows * head_dim, memory + rows * (head_dim + 1)};
}

struct Scratch {
  float* q;       // [rows, head_dim]
  float* scores;  // [rows, kTileKeys], then the weights
  float* keep;    // [rows]: factor of what was summed up before the tile
  Sums chunk;
  Sums total;
  float* k;  // [kTileKeys, head_dim]: a tile of a pool that is not of float32, as floats or words
  float* v;

  // Of a pool of integers, whose factors are words:
  int16_t* q_words;     // in place of q
  int16_t* weights;     // [rows, kTileKeys]
  float* q_units;       // [rows]: what q is multiples of
  float* weight_units;  // [rows]
};

Scratch scratch_at(float* memory, const PagedAttention& op, int64_t rows) {
  const int64_t width = op.head_dim, partial = attention_partial(op, rows);
  Scratch s;
  s.q = memory;
  s.scores = s.q + rows * width;
  s.keep = s.scores + rows * kTileKeys;
  s.chunk = sums_at(s.keep + rows, rows, width);
  s.total = sums_at(s.chunk.values + partial, rows, width);
  s.k = s.total.values + partial;
  s.v = s.k + kTileKeys * width;
  s.q_words = reinterpret_cast<int16_t*>(s.q);
  s.q_units = s.v + kTileKeys * width;
  s.weight_units = s.q_units + rows;
  s.weights = reinterpret_cast<int16_t*>(s.weight_units + rows);
  return s;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// Where K and V of a tile's keys lie, and of the first keys that are read after them.
template <class T>
struct Keys {
  const T* k[kTileKeys + kFarKeys];
  const T* v[kTileKeys + kFarKeys];
};

// The last key of a tile again, in place of what comes after it from number `count` on.
template <class T>
void repeat_last(Keys<T>& keys, int64_t last, int64_t count) {
  for (int64_t key = last + count; key < kTileKeys + kFarKeys; ++key) keys.k[key] = keys.k[last - 1], keys.v[key] = keys.v[last - 1];
}

// Turns the scores of keys [first, last) into weights, and brings `largest` and `weight` of the row up to date.
void soften(float* scores, int64_t first, int64_t last, float& largest_score, float& weight, float& keep) {
  for (int64_t key = 0; key < first; ++key) scores[key] = -INFINITY;
  for (int64_t key = last; key < kTileKeys; ++key) scores[key] = -INFINITY;
  Floats tops = broadcast(largest_score);
  for (int64_t key = 0; key < kTileKeys; key += kLanes) tops = larger(tops, load(scores + key));
  const float top = largest(tops);
  Floats total = zero();
  for (int64_t key = 0; key < kTileKeys; key += kLanes) {
    const Floats weights = exp_of_negative(load(scores + key) - broadcast(top));
    store(scores + key, weights);
    total = total + weights;
  }
  float factor[kLanes];
  store(factor, exp_of_negative(broadcast(largest_score - top)));
  keep = factor[0];
  weight = weight * keep + sum(total);
  largest_score = top;
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

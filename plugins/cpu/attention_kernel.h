// Attention for one instruction set: include after defining QWENRT_ISA. Uses nothing of the standard library that the linker could
// share with code for another instruction set.
#include <cmath>
#include <cstring>

#include "attention.h"
#include "isa.h"
#include "lanes.h"

namespace qwenrt::QWENRT_ISA {
namespace {

constexpr int64_t kMicroKeys = 4;  // a micro tile's sums fill the registers: 4 keys, or 4 vectors of V, by 3 rows or more
constexpr int64_t kMicroRows = kLanes == 16 ? 6 : 3;
// K and V of so many keys ahead are called for: to the second-level cache, and from that to the first, which has too few places for
// all that is on its way from memory.
constexpr int64_t kFarKeys = kTileKeys, kNearKeys = 8;

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
  float* k;  // [kTileKeys, head_dim]: a tile of a pool that is not of floats
  float* v;
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
  return s;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

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

// What the elements of a row of K or V are multiples of, in all lanes, where that is not 1; and elements as floats.
struct One {};
One unit_of(const float*, int64_t) { return {}; }
One unit_of(const Float16*, int64_t) { return {}; }
Floats unit_of(const int8_t* row, int64_t width) {
  float scale;
  std::memcpy(&scale, row + width, sizeof scale);
  return broadcast(scale);
}
template <class T>
Floats load_row(const T* p, One) {
  return load(p);
}
Floats load_row(const int8_t* p, Floats unit) { return load(p) * unit; }

// scores[m][n] = q[m] . k[n] for one micro tile; each sum runs over head_dim in the same order whatever the tile.
template <int Rows, class T>
void score_micro_tile(const float* q, const T* const* k, int64_t width, float* scores) {
  Floats sums[Rows][kMicroKeys];
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < kMicroKeys; ++n) sums[m][n] = zero();
  decltype(unit_of(k[0], width)) units[kMicroKeys];
  for (int n = 0; n < kMicroKeys; ++n) units[n] = unit_of(k[n], width);
  for (int64_t d = 0; d < width; d += kLanes) {
    Floats qs[Rows];
    for (int m = 0; m < Rows; ++m) qs[m] = load(q + m * width + d);
    for (int n = 0; n < kMicroKeys; ++n) {
      const Floats key = load_row(k[n] + d, units[n]);
      for (int m = 0; m < Rows; ++m) sums[m][n] = multiply_add(qs[m], key, sums[m][n]);
    }
  }
  for (int m = 0; m < Rows; ++m) store_sums(scores + m * kTileKeys, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

template <class T>
float score(const float* q, const T* k, int64_t width) {
  const auto unit = unit_of(k, width);
  Floats total = zero();
  for (int64_t d = 0; d < width; d += kLanes) total = multiply_add(load(q + d), load_row(k + d, unit), total);
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

// values[m] = values[m] * keep[m] + the sum over keys [first, last) of weight * v, for Vectors vectors of head_dim.
template <int Rows, int Vectors, bool Prefetch, class T>
void weigh_micro_tile(const float* weights, const float* keep, const T* const* v, int64_t first, int64_t last, int64_t column,
                      int64_t width, float* values) {
  Floats sums[Rows][Vectors];
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < Vectors; ++n) sums[m][n] = load(values + m * width + n * kLanes) * broadcast(keep[m]);
  for (int64_t key = first; key < last; ++key) {
    const T* row = v[key] + column;
    const auto unit = unit_of(v[key], width);
    if constexpr (Prefetch) prefetch_ahead(v + key, column, Vectors * kLanes);
    Floats factor[Rows];
    for (int m = 0; m < Rows; ++m) factor[m] = broadcast(weights[m * kTileKeys + key]);
    for (int n = 0; n < Vectors; ++n) {
      const Floats value = load_row(row + n * kLanes, unit);
      for (int m = 0; m < Rows; ++m) sums[m][n] = multiply_add(factor[m], value, sums[m][n]);
    }
  }
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < Vectors; ++n) store(values + m * width + n * kLanes, sums[m][n]);
}

template <int Rows, int Vectors, bool Prefetch, class T>
void weigh_columns(const float* weights, const float* keep, int64_t rows, const T* const* v, int64_t first, int64_t last,
                   int64_t column, int64_t width, float* values) {
  in_blocks<Rows>(0, rows, [&](auto count, int64_t m) {
    weigh_micro_tile<count.value, Vectors, Prefetch>(weights + m * kTileKeys, keep + m, v, first, last, column, width, values + m * width);
  });
}

// Of few rows all sums of a row that registers hold, so that V is read in the order in which it lies.
template <class T>
void weigh_tile(const float* weights, const float* keep, int64_t rows, const T* const* v, int64_t first, int64_t last, int64_t width,
                float* values) {
  constexpr int kVectors = 4, kMostVectors = kLanes == 16 ? 8 : 4;
  int64_t d = 0;
  if (rows <= kFewRows)
    for (; d + kMostVectors * kLanes <= width; d += kMostVectors * kLanes)
      weigh_columns<2, kMostVectors, true>(weights, keep, rows, v, first, last, d, width, values + d);
  for (; d + kVectors * kLanes <= width; d += kVectors * kLanes)
    weigh_columns<kMicroRows, kVectors, false>(weights, keep, rows, v, first, last, d, width, values + d);
  for (; d < width; d += kLanes) weigh_columns<kMicroRows, 1, false>(weights, keep, rows, v, first, last, d, width, values + d);
}

// Where K and V of a tile's keys lie, and of the first keys that are read after them.
template <class T>
struct Keys {
  const T* k[kTileKeys + kFarKeys];
  const T* v[kTileKeys + kFarKeys];
};

// Adds keys [first, last) of a tile to the sums of rows [row, row + rows), all of which see all of them.
template <class T>
void add_keys(const Scratch& s, int64_t row, int64_t rows, const Keys<T>& keys, int64_t first, int64_t last, int64_t width) {
  float* scores = s.scores + row * kTileKeys;
  score_tile(s.q + row * width, rows, keys.k, first, last, width, scores);
  for (int64_t m = 0; m < rows; ++m)
    soften(scores + m * kTileKeys, first, last, s.chunk.largest[row + m], s.chunk.weights[row + m], s.keep[row + m]);
  weigh_tile(scores, s.keep + row, rows, keys.v, first, last, width, s.chunk.values + row * width);
}

// Adds the tile of keys that starts at `start` to the rows of one KV head, which begin at `row`. Keys that a row does not see take no part, so what lies there does not matter.
template <class T>
void add_tile(const PagedAttention& op, const QueryTile& tile, int64_t row, int64_t start, const Keys<T>& keys, const Scratch& s) {
  const int64_t width = op.head_dim, group = op.group(), position = tile.position, end = start + kTileKeys;
  // Positions [whole, whole_end) see the whole tile.
  const int64_t last = position + tile.count;
  const int64_t whole = smaller(greater(position, end - 1), last);
  const bool window_ends = op.sliding_window > 0 && op.sliding_window < last - start;
  const int64_t whole_end = window_ends ? greater(start + op.sliding_window, whole) : last;
  if (whole < whole_end) add_keys(s, row + (whole - position) * group, (whole_end - whole) * group, keys, 0, kTileKeys, width);
  for (int64_t p = position; p < last; ++p) {
    if (p == whole) p = whole_end;
    if (p == last) break;
    const int64_t from = greater(op.first_key(p), start), to = smaller(p + 1, end);
    if (from < to) add_keys(s, row + (p - position) * group, group, keys, from - start, to - start, width);
  }
}

template <class T>
void convert_row(const T* from, int64_t width, float* to) {
  const auto unit = unit_of(from, width);
  for (int64_t d = 0; d < width; d += kLanes) store(to + d, load_row(from + d, unit));
}

// k[i] and v[i] for keys start + [first, last).
template <class T>
void find_keys(const PagedAttention& op, int64_t seq, int64_t kv_head, int64_t start, int64_t first, int64_t last, const T** k,
               const T** v) {
  const T* pool = static_cast<const T*>(op.kv_cache_out);
  const int64_t v_offset = op.v_offset(), stride = op.row_elements();
  for (int64_t i = first; i < last;) {
    const T* row = pool + op.slot(seq, kv_head, start + i);
    const int64_t stop = smaller(last, ((start + i) / op.block_size + 1) * op.block_size - start);
    for (; i < stop; ++i, row += stride) {
      k[i] = row;
      v[i] = row + v_offset;
    }
  }
}

// The last key of a tile again, in place of what comes after it from number `count` on.
template <class T>
void repeat_last(Keys<T>& keys, int64_t last, int64_t count) {
  for (int64_t key = last + count; key < last + kFarKeys; ++key) keys.k[key] = keys.k[last - 1], keys.v[key] = keys.v[last - 1];
}

// Fills `keys` up, behind keys [first, last) of head i of a tile, with those that come after: the next head's, or the next tile's.
template <class T>
void find_next_keys(const PagedAttention& op, const QueryTile& tile, int64_t i, int64_t start, int64_t first, int64_t last, int64_t end,
                    Keys<T>& keys) {
  const bool more_heads = i + 1 < tile.kv_heads;
  const int64_t next = more_heads ? start + first : start + last, stop = more_heads ? start + last : end;
  const int64_t count = smaller(stop - next, kFarKeys);
  find_keys(op, tile.seq, more_heads ? tile.kv_head + i + 1 : tile.kv_head, next, 0, count, keys.k + last, keys.v + last);
  repeat_last(keys, last, greater(count, 0));
}

// The keys of one tile, as floats in scratch memory.
template <class T>
void add_converted_tile(const PagedAttention& op, const QueryTile& tile, int64_t row, int64_t start, int64_t first, int64_t last,
                        const Keys<T>& keys, const Scratch& s) {
  Keys<float> wide;
  for (int64_t i = first; i < last; ++i) {
    convert_row(keys.k[i], op.head_dim, s.k + i * op.head_dim);
    convert_row(keys.v[i], op.head_dim, s.v + i * op.head_dim);
    wide.k[i] = s.k + i * op.head_dim;
    wide.v[i] = s.v + i * op.head_dim;
  }
  repeat_last(wide, last, 0);
  add_tile(op, tile, row, start, wide, s);
}

// The sums of one chunk of the context to s.chunk. Tiles are the outer loop and heads the inner, as the pool has them.
template <class T>
void add_chunk(const PagedAttention& op, const QueryTile& tile, int64_t chunk, const Scratch& s) {
  const int64_t rows = tile.rows(op), head_rows = rows / tile.kv_heads;
  for (int64_t i = 0; i < rows * op.head_dim; ++i) s.chunk.values[i] = 0;
  for (int64_t m = 0; m < rows; ++m) s.chunk.largest[m] = -INFINITY, s.chunk.weights[m] = 0;

  const int64_t begin = greater(op.first_key(tile.position), chunk * kChunkKeys);
  const int64_t end = smaller(tile.position + tile.count, (chunk + 1) * kChunkKeys);
  for (int64_t start = begin / kTileKeys * kTileKeys; start < end; start += kTileKeys) {
    const int64_t first = greater(begin - start, 0), last = smaller(end - start, kTileKeys);
    for (int64_t i = 0; i < tile.kv_heads; ++i) {
      Keys<T> keys;
      find_keys(op, tile.seq, tile.kv_head + i, start, first, last, keys.k, keys.v);
      if constexpr (sizeof(T) < sizeof(float)) {
        if (head_rows > kFewRows) {
          add_converted_tile(op, tile, i * head_rows, start, first, last, keys, s);
          continue;
        }
      }
      find_next_keys(op, tile, i, start, first, last, end, keys);
      add_tile(op, tile, i * head_rows, start, keys, s);
    }
  }
}

void add_chunk(const PagedAttention& op, const QueryTile& tile, int64_t chunk, const Scratch& s) {
  if (op.kv_type == ElementType::kFloat16) {
    add_chunk<Float16>(op, tile, chunk, s);
  } else if (op.kv_type == ElementType::kInt8) {
    add_chunk<int8_t>(op, tile, chunk, s);
  } else {
    add_chunk<float>(op, tile, chunk, s);
  }
}

float* attn_row(const PagedAttention& op, const QueryTile& tile, int64_t row) {
  const int64_t group = op.group(), token = row / group % tile.count, kv_head = row / group / tile.count;
  return op.attn + ((tile.token + token) * op.num_heads + (tile.kv_head + kv_head) * group + row % group) * op.head_dim;
}

void gather_queries(const PagedAttention& op, const QueryTile& tile, float* q) {
  const int64_t group = op.group(), width = group * op.head_dim;
  for (int64_t i = 0; i < tile.kv_heads * tile.count; ++i)
    std::memcpy(q + i * width, attn_row(op, tile, i * group), sizeof(float) * width);
}

// Adds `sums`, of one chunk, to `total`; a row's first chunk is taken as it is.
void merge(const PagedAttention& op, const QueryTile& tile, int64_t chunk, const Sums& sums, const Sums& total) {
  const int64_t width = op.head_dim, rows = tile.rows(op);
  for (int64_t m = 0; m < rows; ++m) {
    const int64_t position = tile.position + m / op.group() % tile.count, first_chunk = op.first_key(position) / kChunkKeys;
    if (chunk < first_chunk || chunk > position / kChunkKeys) continue;
    float *values = total.values + m * width, &top = total.largest[m], &weight = total.weights[m];
    const float* added = sums.values + m * width;
    if (chunk == first_chunk) {
      std::memcpy(values, added, sizeof(float) * width);
      top = sums.largest[m], weight = sums.weights[m];
      continue;
    }
    const float new_top = sums.largest[m] > top ? sums.largest[m] : top;
    float keep[kLanes], take[kLanes];
    store(keep, exp_of_negative(broadcast(top - new_top)));
    store(take, exp_of_negative(broadcast(sums.largest[m] - new_top)));
    for (int64_t d = 0; d < width; d += kLanes)
      store(values + d, multiply_add(load(added + d), broadcast(take[0]), load(values + d) * broadcast(keep[0])));
    weight = weight * keep[0] + sums.weights[m] * take[0];
    top = new_top;
  }
}

void write_attn(const PagedAttention& op, const QueryTile& tile, const Sums& total) {
  const int64_t width = op.head_dim, rows = tile.rows(op);
  for (int64_t m = 0; m < rows; ++m) {
    float* out = attn_row(op, tile, m);
    const Floats factor = broadcast(1 / total.weights[m]);
    for (int64_t d = 0; d < width; d += kLanes) store(out + d, load(total.values + m * width + d) * factor);
  }
}

void attend(const PagedAttention& op, const QueryTile& tile, float* memory) {
  const Scratch s = scratch_at(memory, op, tile.rows(op));
  gather_queries(op, tile, s.q);
  for (int64_t chunk = tile.first_chunk(op); chunk <= tile.last_chunk(); ++chunk) {
    add_chunk(op, tile, chunk, s);
    merge(op, tile, chunk, s.chunk, s.total);
  }
  write_attn(op, tile, s.total);
}

void attend_chunk(const PagedAttention& op, const QueryTile& tile, int64_t chunk, float* memory, float* partials) {
  const int64_t rows = tile.rows(op);
  Scratch s = scratch_at(memory, op, rows);
  gather_queries(op, tile, s.q);
  s.chunk = sums_at(partials + (chunk - tile.first_chunk(op)) * attention_partial(op, rows), rows, op.head_dim);
  add_chunk(op, tile, chunk, s);
}

void merge_chunks(const PagedAttention& op, const QueryTile& tile, float* memory, const float* partials) {
  const int64_t rows = tile.rows(op), first = tile.first_chunk(op);
  const Scratch s = scratch_at(memory, op, rows);
  for (int64_t chunk = first; chunk <= tile.last_chunk(); ++chunk) {
    float* partial = const_cast<float*>(partials) + (chunk - first) * attention_partial(op, rows);
    merge(op, tile, chunk, sums_at(partial, rows, op.head_dim), s.total);
  }
  write_attn(op, tile, s.total);
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

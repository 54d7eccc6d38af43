// Attention for one instruction set: include after defining QWENRT_ISA.
#include <cmath>
#include <cstring>

#include "float_attention.h"
#include "integer_prefill.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// Adds the tile of keys that starts at `start` to the rows of one KV head, which begin at `row`. Keys that a row does not see take no part,
// so what lies there does not matter.
template <class Tile>
void add_tile(const PagedAttention& op, const QueryTile& tile, int64_t row, int64_t start, const Tile& keys, const Scratch& s) {
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

// The same of few rows, for which a tile is read where it lies; its keys begin with `first`.
template <class T>
void add_tile_in_pool(const PagedAttention& op, const QueryTile& tile, int64_t row, int64_t start, int64_t, Keys<T>& keys,
                      const Scratch& s) {
  add_tile(op, tile, row, start, keys, s);
}
void add_tile_in_pool(const PagedAttention& op, const QueryTile& tile, int64_t row, int64_t start, int64_t first, Keys<int8_t>& keys,
                      const Scratch& s) {
  repeat_first(keys, first);
  if (op.head_dim % kWordLanes == 0) {
    add_tile(op, tile, row, start, PoolTile<false>{keys, op.head_dim}, s);
  } else {
    add_tile(op, tile, row, start, PoolTile<true>{keys, op.head_dim}, s);
  }
}

// The same of many rows, which are those of one KV head.
void add_widened_tile(const PagedAttention& op, const QueryTile& tile, int64_t start, const Keys<float>& keys, int64_t, int64_t,
                      const Scratch& s) {
  add_tile(op, tile, 0, start, keys, s);
}
void add_widened_tile(const PagedAttention& op, const QueryTile& tile, int64_t start, const Keys<Float16>& keys, int64_t first,
                      int64_t last, const Scratch& s) {
  add_tile(op, tile, 0, start, widen(keys, first, last, op.head_dim, s), s);
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
      find_next_keys(op, tile, i, start, first, last, end, keys);
      if (head_rows <= op.few_rows()) {
        add_tile_in_pool(op, tile, i * head_rows, start, first, keys, s);
      } else {
        add_widened_tile(op, tile, start, keys, first, last, s);
      }
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

void gather_queries(const PagedAttention& op, const QueryTile& tile, const Scratch& s) {
  const int64_t rows = tile.rows(op), width = op.head_dim;
  if (op.kv_type == ElementType::kInt8) std::memset(s.q, 0, sizeof(float) * static_cast<size_t>(rows * width));
  for (int64_t m = 0; m < rows; ++m) {
    const float* row = attn_row(op, tile, m);
    if (op.kv_type != ElementType::kInt8) {
      std::memcpy(s.q + m * width, row, sizeof(float) * static_cast<size_t>(width));
    } else if (rows / tile.kv_heads <= kFewIntegerRows) {
      round_query(row, width, m, s);
    } else {
      pair_query(row, width, m, rows, s);
    }
  }
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
  gather_queries(op, tile, s);
  for (int64_t chunk = tile.first_chunk(op); chunk <= tile.last_chunk(); ++chunk) {
    add_chunk(op, tile, chunk, s);
    merge(op, tile, chunk, s.chunk, s.total);
  }
  write_attn(op, tile, s.total);
}

void attend_chunk(const PagedAttention& op, const QueryTile& tile, int64_t chunk, float* memory, float* partials) {
  const int64_t rows = tile.rows(op);
  Scratch s = scratch_at(memory, op, rows);
  gather_queries(op, tile, s);
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

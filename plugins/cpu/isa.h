// The kernels of each instruction set, and the choice among them.
#pragma once

#include "attention.h"
#include "linear.h"

namespace qwenrt {

// All pointers are to memory of the caller; nothing here allocates or throws. A kernel must be given head_dim and lanes that fit:
// head_dim is a multiple of `lanes`.
struct Isa {
  const char* name;
  int lanes;

  // y for weight rows [first, last) and all rows of x.
  void (*linear_columns)(const Linear& op, int64_t first, int64_t last);

  // The same on tiles, null where there are none, where fits_tiles: a group of rows of x in parts; and y for weight rows [first, last).
  // `scratch`: tile_scratch(op.rows, last - first) floats.
  void (*split_rows)(const Linear& op, const SplitRows& x, int64_t group);
  void (*tiled_columns)(const Linear& op, const SplitRows& x, int64_t first, int64_t last, float* scratch);

  // Columns [first, last) of y += low b for `rows` rows, whose y begins at `row`, with low [rows, rank] and the b of one adapter.
  void (*lora_columns)(const Lora& op, const float* low, const float* b, int64_t row, int64_t rows, int64_t first, int64_t last);

  // out = silu(gate) * up.
  void (*swiglu)(const float* gate, const float* up, float* out, int64_t count);

  // The same for integer weights: a row of x rounded to integers, as `rounding` says; and a task's panels of y. `scratch`:
  // integer_scratch(isa, op, panels of the task) bytes.
  Rounding rounding;
  void (*round_row)(const float* x, int64_t depth, const RoundedRows& rows, int64_t row);
  void (*integer_panels)(const Linear& op, const RoundedRows& x, const PanelTask& task, int8_t* scratch);

  // The largest of each `size` (of kPeakUnit) of `count` logits, NaN where one of them is NaN; and e^((x - peak) * scale), peak the largest x.
  void (*block_peaks)(const float* x, int64_t count, int64_t size, float* peaks);
  void (*sampling_weights)(const float* x, int64_t count, float peak, float scale, float* out);

  // RMSNorm and rotation of one token's q, times scale, to its row of attn, and of its k; k and v to the pool.
  void (*prepare_token)(const PagedAttention& op, int64_t seq, int64_t token);

  // Attention of a query tile from its rows of attn, in place. `scratch`: attention_scratch(op, rows of the tile) floats.
  void (*attend)(const PagedAttention& op, const QueryTile& tile, float* scratch);

  // The same in parts, for other threads to share: chunk by chunk, each to its own attention_partial(op, rows) floats (the chunks'
  // one after the other in `partials`), and when all are done, together.
  void (*attend_chunk)(const PagedAttention& op, const QueryTile& tile, int64_t chunk, float* scratch, float* partials);
  void (*merge_chunks)(const PagedAttention& op, const QueryTile& tile, float* scratch, const float* partials);
};

inline int64_t attention_partial(const PagedAttention& op, int64_t rows) { return rows * (op.head_dim + 2); }
inline int64_t attention_scratch(const PagedAttention& op, int64_t rows) {
  return rows * (op.head_dim + kTileKeys + 1) + 2 * attention_partial(op, rows) + 2 * kTileKeys * op.head_dim +
         rows * (2 + kTileKeys / 2);
}

// Whether a product is on tiles: never a matter of its rows, whose bits would differ.
inline bool fits_tiles(const Isa& kernels, ElementType weight, int64_t depth) {
  return kernels.tiled_columns != nullptr && weight == ElementType::kBFloat16 && depth >= kTileStep;
}

// The sums of y, and behind them a chunk of the weights.
inline int64_t tile_sums(int64_t rows, int64_t channels) { return (rows + 15) / 16 * 16 * ((channels + 15) / 16 * 16); }
inline int64_t tile_scratch(int64_t rows, int64_t channels) {
  return tile_sums(rows, channels) + (channels + 15) / 16 * 16 * kTileChunk / 2;
}

// The panels in int8, where so many rows do not meet codes as they are.
inline int64_t integer_scratch(const Isa& kernels, const Linear& op, int64_t panels) {
  const bool widened = op.weight.type == ElementType::kUint8 && op.rows > kernels.rounding.most_code_rows;
  return widened ? panels * op.weight.depth * kPanelWidth : 0;
}
// Rows of x that a kernel may read beyond the last, to fill a tile.
constexpr int64_t kRowsUnit = 16;

// The instruction set in use for heads of this width: the one that select_isa set, or the best that this machine has.
const Isa& isa(int64_t head_dim = 0);

// False, and nothing changed, if this machine or this library lacks it; null restores the best.
bool select_isa(const char* name);

}  // namespace qwenrt

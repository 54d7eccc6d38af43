// y = x W^T + b for the few rows of a decoding step and the many of a prefill, straight from the weights as they lie on disk.
#pragma once

#include <cstdint>

#include "element_type.h"

namespace qwenrt {

// Integer weights lie in panels of 16 output channels, as qwenrt/plugins/panels.py makes them: four columns of a panel ("a quad") are 64
// bytes, each channel's four together. The depth is filled up with zeros to whole groups, and to a multiple of 64.
constexpr int64_t kPanelWidth = 16;
constexpr int64_t kQuad = 4;
constexpr int64_t kQuadBytes = kPanelWidth * kQuad;
constexpr int64_t kDepthUnit = 64;
// The largest sum of products, 127 * 127 * depth, fits an int32.
constexpr int64_t kMaxIntegerDepth = int64_t{1} << 17;

// [width, depth], row-major and dense, aligned to its element; or integers, whose panels hold `depth` columns with the filling.
struct Weight {
  const void* data;
  const float* scale;         // [width], for integers
  const uint8_t* groups;      // [panels, depth / group_size, 16], for uint8: multiplier | zero point << 4
  const float* group_scale;   // the same shape, where a group's integers are multiples of a number of their own; or null
  const float* group_offset;  // the same, where a number is added to these products; or null
  int64_t width;
  int64_t depth;
  int64_t group_size;  // for uint8, and with group_scale
  ElementType type;

  bool is_integer() const { return type == ElementType::kInt8 || type == ElementType::kUint8; }
  int64_t panels() const { return (width + kPanelWidth - 1) / kPanelWidth; }
  int64_t num_groups() const { return type == ElementType::kUint8 || group_scale != nullptr ? depth / group_size : 0; }
  int64_t panel_bytes() const { return depth * kPanelWidth / (type == ElementType::kUint8 ? 2 : 1); }
  const int8_t* panel(int64_t i) const { return static_cast<const int8_t*>(data) + i * panel_bytes(); }
  const uint8_t* pairs(int64_t i) const { return static_cast<const uint8_t*>(data) + i * panel_bytes(); }
  // Where a panel's part of `groups`, `group_scale` and `group_offset` begins.
  int64_t panel_start(int64_t i) const { return i * num_groups() * kPanelWidth; }
  const uint8_t* panel_groups(int64_t i) const { return groups + panel_start(i); }

  // Rows [first, first + count); of integers, `first` is a multiple of a panel's width.
  Weight part(int64_t first, int64_t count) const {
    Weight rows = *this;
    rows.width = count;
    if (is_integer()) {
      const int64_t start = panel_start(first / kPanelWidth);
      rows.data = panel(first / kPanelWidth), rows.scale = scale + first;
      if (groups != nullptr) rows.groups = groups + start;
      if (group_scale != nullptr) rows.group_scale = group_scale + start;
      if (group_offset != nullptr) rows.group_offset = group_offset + start;
    } else {
      rows.data = static_cast<const char*>(data) + first * depth * (type == ElementType::kFloat32 ? 4 : 2);
    }
    return rows;
  }
};

// A row of y has the same bits whatever other rows are computed with it: with float weights each sum runs in one order that
// depends on `depth` alone; with integers a row of x is rounded to int8 by itself, and sums are exact, or where groups have scales of
// their own exact within a group, and float32 from group to group.
struct Linear {
  const float* x;  // [rows, depth]
  Weight weight;
  const float* bias;  // [width], or null
  float* y;           // [rows, width]
  int64_t rows;
  int64_t depth;
};

// y += (x A^T) B, row by row with the A and B of the row's adapter. A row of B is as wide as y, so that its products need no sums across
// lanes.
struct Lora {
  const float* x;           // [rows, depth]
  const int32_t* adapters;  // [rows]; -1: none
  const float* a;           // [count, rank, depth]
  const float* b;           // [count, rank, width]
  float* y;                 // [rows, width]
  int64_t rows;
  int64_t depth;
  int64_t width;
  int64_t rank;
  int64_t count;
};

// y = rows `ids` of an integer weight.
struct Embedding {
  const int32_t* ids;  // [rows]
  Weight weight;
  float* y;  // [rows, depth]
  int64_t rows;
  int64_t depth;
};

// How the kernels of an instruction set want rows of x for integer weights.
struct Rounding {
  bool words;              // with int8 weights: as words, of each quad the even ones before the odd ones
  int64_t most_code_rows;  // up to so many rows meet 4-bit codes as they are
  int64_t run_columns;     // and need sums of runs of so many columns of a group, or what is left of it
};

// Rows of x rounded to integers within +-127: x = values * scale. Rows follow one another every `stride` bytes, zeros beyond the depth.
struct RoundedRows {
  int8_t* values = nullptr;       // [rows, stride]
  float* scale = nullptr;         // [rows]; NaN for a row that is not finite
  int32_t* sum = nullptr;         // [rows]: of the values
  int32_t* group_sums = nullptr;  // [rows, num_groups]: of the values that meet a group of weights with a scale of its own
  int32_t* minus_sums = nullptr;  // [rows, num_runs]: what a kernel needs of the values that meet a run of codes
  bool words = false;
  int64_t stride = 0, group_size = 0, num_groups = 0, run_columns = 0, num_runs = 0;

  RoundedRows() = default;
  // For products of up to `rows` rows.
  RoundedRows(const Weight& weight, const Rounding& rounding, int64_t rows)
      : words(rounding.words && weight.type == ElementType::kInt8), stride(weight.depth * (words ? 2 : 1)), group_size(weight.group_size) {
    if (weight.group_scale != nullptr) num_groups = weight.num_groups();
    if (weight.type != ElementType::kUint8 || rows > rounding.most_code_rows) return;
    run_columns = rounding.run_columns;
    num_runs = weight.num_groups() * (group_size / run_columns + (group_size % run_columns != 0));
  }

  // What `rows` rows take, which begins at a float.
  int64_t bytes(int64_t rows) const { return rows * (stride + (2 + num_groups + num_runs) * static_cast<int64_t>(sizeof(int32_t))); }
  void place(int8_t* memory, int64_t rows) {
    values = memory;
    scale = reinterpret_cast<float*>(memory + rows * stride);
    sum = reinterpret_cast<int32_t*>(scale + rows);
    group_sums = sum + rows;
    minus_sums = group_sums + rows * num_groups;
  }
  RoundedRows from(int64_t row) const {
    RoundedRows rows = *this;
    rows.values += row * stride, rows.scale += row, rows.sum += row;
    rows.group_sums += row * num_groups, rows.minus_sums += row * num_runs;
    return rows;
  }
};

// Panels [first, last) of a weight, and those that the same thread will probably have next, for memory to bring meanwhile.
struct PanelTask {
  int64_t first, last;
  int64_t next = 0, next_last = 0;
};

// Tiles of bfloat16 take x in groups of up to 16 rows, in steps of 32 columns, and every number of it in three parts.
constexpr int64_t kGroupRows = 16;
constexpr int64_t kTileStep = 32;
constexpr int64_t kRowParts = 3;
constexpr int64_t kTileChunk = 128;  // columns that are summed up in a tile

// Rows of x in such parts, two bfloat16s to a word, zeros beyond the rows and columns that there are.
struct SplitRows {
  uint32_t* words;  // [groups, steps, part, pairs of a step, columns]
  int64_t columns;  // rows of a group
  int64_t steps;

  SplitRows(int64_t rows, int64_t depth)
      : words(nullptr), columns(rows < kGroupRows ? rows : kGroupRows), steps((depth + kTileStep - 1) / kTileStep) {}

  int64_t groups(int64_t rows) const { return (rows + columns - 1) / columns; }
  int64_t count(int64_t groups) const { return groups * steps * kRowParts * kTileStep / 2 * columns; }
  uint32_t* step(int64_t group, int64_t i) const { return words + (group * steps + i) * kRowParts * kTileStep / 2 * columns; }
};

}  // namespace qwenrt

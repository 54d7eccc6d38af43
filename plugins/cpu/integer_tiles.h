// The same on AMX's tiles of int8, to the same bits.
#pragma once

#include "integer_products.h"
#include "tiles.h"
#include "widened_codes.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// For fewer rows, tiles do more work than they save.
constexpr int64_t kFewestTileRows = 8;

// Whether 64 columns have whole groups, or lie in one.
bool groups_fit_units(const Weight& weight) { return kDepthUnit % weight.group_size == 0 || weight.group_size % kDepthUnit == 0; }

// Columns [k, k + 64) of a panel where groups fit.
void widen_unit(const Weight& weight, int64_t panel, int64_t k, int8_t* quads) {
  const int64_t columns = weight.group_size < kDepthUnit ? weight.group_size : kDepthUnit;
  for (const int64_t end = k + kDepthUnit; k < end; k += columns, quads += columns * kPanelWidth)
    widen_columns(weight.pairs(panel) + k * kPanelWidth / 2, load_group(weight.panel_groups(panel) + k / weight.group_size * kPanelWidth),
                  columns, quads);
}

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 columns of panels, of which one product takes `columns`.
TileConfig config_for(int64_t columns) {
  TileConfig config;
  config.row_bytes[4] = config.row_bytes[5] = static_cast<uint16_t>(columns);
  config.rows[6] = config.rows[7] = static_cast<uint8_t>(columns / kQuad);
  return config;
}

// Columns of a product of tiles: all of one group, where groups have scales of their own.
int64_t tile_columns(const Weight& weight) {
  return weight.group_scale != nullptr && weight.group_size < kDepthUnit ? weight.group_size : kDepthUnit;
}

// How many of a tile's rows, from `row` on, there are.
int64_t rows_of_tile(const Linear& op, int64_t row) { return op.rows - row < kTile ? op.rows - row : kTile; }

// y of up to 16 rows and a panel's channels.
template <class Sum>
void write_tile(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const Sum* sums) {
  const int64_t rows = rows_of_tile(op, row), first = panel * kPanelWidth, width = op.weight.width;
  if (first + kPanelWidth > width) {
    for (int64_t m = 0; m < rows; ++m) write_outputs(op, x, row + m, panel, sums + m * kPanelWidth);
    return;
  }
  static_assert(kLanes == kPanelWidth);
  const Floats scale = load(op.weight.scale + first);
  float* y = op.y + row * width + first;
  for (int64_t m = 0; m < rows; ++m, y += width, sums += kPanelWidth) {
    const Floats product = as_floats(sums) * (broadcast(x.scale[row + m]) * scale);
    store(y, op.bias == nullptr ? product : product + load(op.bias + first));
  }
}

constexpr int64_t kUnitBytes = kPanelWidth * kDepthUnit;

// Columns of two panels, int8.
struct Units {
  const int8_t *left, *right;
};

// Two panels, or one twice unless `both`, by one or two tiles of rows.
struct TileTask {
  const Linear& op;
  const RoundedRows& x;
  int64_t row, panel;
  bool both;

  // Calls work(the number of its tile, row, panel) for each tile of sums that is wanted.
  template <bool TwoTiles, class Work>
  void for_tiles(const Work& work) const {
    for (int tile = 0; tile < (TwoTiles ? 4 : 2); ++tile)
      if (both || tile % 2 == 0) work(tile, row + tile / 2 * kTile, panel + tile % 2);
  }
};

constexpr int64_t kTileSums = kTile * kPanelWidth;

// `sums`: of columns [first, last); units(k) gives the panels' columns from k on.
template <bool TwoTiles, class GetUnits>
void sum_tiles(const TileTask& task, int64_t first, int64_t last, const GetUnits& units, int32_t (&sums)[4][kTileSums]) {
  const int64_t stride = task.x.stride, columns = tile_columns(task.op.weight);
  const int8_t* values = task.x.values + task.row * stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TwoTiles) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = first; k < last; k += columns) {
    const Units w = units(k);
    _tile_loadd(4, values + k, stride);
    _tile_loadd(6, w.left, kQuadBytes);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, w.right, kQuadBytes);
    _tile_dpbssd(1, 4, 7);
    if constexpr (TwoTiles) {
      _tile_loadd(5, values + kTile * stride + k, stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], kQuadBytes);
  _tile_stored(1, sums[1], kQuadBytes);
  if constexpr (TwoTiles) {
    _tile_stored(2, sums[2], kQuadBytes);
    _tile_stored(3, sums[3], kQuadBytes);
  }
}

template <bool TwoTiles, class GetUnits>
void multiply_tiles(const TileTask& task, const GetUnits& units) {
  const Weight& weight = task.op.weight;
  alignas(64) int32_t sums[4][kTileSums];
  if (weight.group_scale == nullptr) {
    sum_tiles<TwoTiles>(task, 0, weight.depth, units, sums);
    task.for_tiles<TwoTiles>([&](int tile, int64_t row, int64_t panel) { write_tile(task.op, task.x, row, panel, sums[tile]); });
    return;
  }
  alignas(64) float totals[4][kTileSums] = {};
  for (int64_t g = 0; g < weight.num_groups(); ++g) {
    sum_tiles<TwoTiles>(task, g * weight.group_size, (g + 1) * weight.group_size, units, sums);
    task.for_tiles<TwoTiles>([&](int tile, int64_t row, int64_t panel) {
      const GroupScales scales(weight, panel, g);
      const int32_t* sum_of_x = task.x.group_sums + row * task.x.num_groups + g;
      for (int64_t m = 0; m < rows_of_tile(task.op, row); ++m, sum_of_x += task.x.num_groups) {
        float* total = totals[tile] + m * kPanelWidth;
        Floats next = load(total);
        scales.add(&next, _mm512_load_si512(sums[tile] + m * kPanelWidth), *sum_of_x);
        store(total, next);
      }
    });
  }
  task.for_tiles<TwoTiles>([&](int tile, int64_t row, int64_t panel) { write_tile(task.op, task.x, row, panel, totals[tile]); });
}

template <class GetUnits>
void multiply_two_panels(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, bool both, const GetUnits& units) {
  const TileTask task{op, x, row, panel, both};
  if (row + kTile < op.rows) {
    multiply_tiles<true>(task, units);
  } else {
    multiply_tiles<false>(task, units);
  }
}

// One or two tiles of rows pass but once: codes are widened just before their product, so that memory never rests.
void widening_tiles(const Linear& op, const RoundedRows& x, int64_t first, int64_t last) {
  alignas(64) int8_t ring[2][2][kUnitBytes];
  for (int64_t panel = first; panel < last; panel += 2) {
    const int64_t right = panel + 1 < last ? panel + 1 : panel;
    multiply_two_panels(op, x, 0, panel, right != panel, [&](int64_t k) -> Units {
      auto& units = ring[k / kDepthUnit % 2];
      const int64_t in_unit = k % kDepthUnit;
      if (in_unit == 0) {
        widen_unit(op.weight, panel, k, units[0]);
        widen_unit(op.weight, right, k, units[1]);
        finish_stores();
      }
      return {units[0] + in_unit * kPanelWidth, units[1] + in_unit * kPanelWidth};
    });
  }
}

// The panels of a task lie in a second-level cache while rows pass by, two tiles of them at a time: so y is written in long stretches.
void cached_tiles(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
  const int64_t bytes = op.weight.depth * kPanelWidth;
  const int8_t* panels = op.weight.panel(first);
  if (op.weight.type == ElementType::kUint8) {
    widen_panels(op.weight, first, last, scratch);
    finish_stores();
    panels = scratch;
  }
  for (int64_t row = 0; row < op.rows; row += 2 * kTile) {
    for (int64_t panel = first; panel < last; panel += 2) {
      const int8_t* left = panels + (panel - first) * bytes;
      const int8_t* right = panel + 1 < last ? left + bytes : left;
      multiply_two_panels(op, x, row, panel, right != left, [&](int64_t k) -> Units { return {left + k * kPanelWidth, right + k * kPanelWidth}; });
    }
  }
}

void tiled_panels(const Linear& op, const RoundedRows& x, const PanelTask& task, int8_t* scratch) {
  const TileConfig config = config_for(tile_columns(op.weight));
  _tile_loadconfig(&config);
  if (op.weight.type == ElementType::kUint8 && op.rows <= 2 * kTile && groups_fit_units(op.weight)) {
    widening_tiles(op, x, task.first, task.last);
  } else {
    cached_tiles(op, x, task.first, task.last, scratch);
  }
  _tile_release();
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

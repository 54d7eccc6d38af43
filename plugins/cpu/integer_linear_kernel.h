// Linear with int8 or 4-bit weights for one instruction set: include after defining QWENRT_ISA.
#include "integer_lanes.h"
#include "lanes.h"
#include "linear.h"
#if defined(__AMX_INT8__)
#include "tiles.h"
#endif

namespace qwenrt::QWENRT_ISA {
namespace {

// How far ahead of their use weights are called for, there being too much work between them for the processor to look so far itself:
// from memory to the second-level cache, and from that to the first, which has too few places for all that is on its way from memory.
constexpr int64_t kFarBytes = 4096, kNearBytes = 256;

void prefetch(const void* p) {
  __builtin_prefetch(static_cast<const char*>(p) + kFarBytes, 0, 2);
  __builtin_prefetch(static_cast<const char*>(p) + kNearBytes, 0, 3);
}

// Sums of a panel's channels in float32, where groups have scales of their own.
struct Totals {
  Floats part[kPanelWidth / kLanes];
};

Floats as_floats(const int32_t* sums) {
  Ints whole;
  __builtin_memcpy(&whole, sums, sizeof whole);
  return __builtin_convertvector(whole, Floats);
}
Floats as_floats(const float* sums) { return load(sums); }

// What a panel's group, the g-th, has beside its integers.
struct GroupScales {
  const float *scale, *offset;

  GroupScales(const Weight& weight, int64_t panel, int64_t g)
      : scale(weight.group_scale + weight.panel_start(panel) + g * kPanelWidth),
        offset(weight.group_offset == nullptr ? nullptr : scale - weight.group_scale + weight.group_offset) {}

  // Adds the products of a group to those of the groups before it, of a panel's channels: in this order on every path, so that a row's
  // bits do not depend on it.
  void add(Floats* totals, const int32_t* sums, int32_t sum_of_x) const {
    for (int i = 0; i < kPanelWidth / kLanes; ++i) {
      totals[i] = multiply_add(as_floats(sums + i * kLanes), load(scale + i * kLanes), totals[i]);
      if (offset != nullptr) totals[i] = multiply_add(broadcast(static_cast<float>(sum_of_x)), load(offset + i * kLanes), totals[i]);
    }
  }
};

// Columns of a 4-bit panel, all of one group, in int8, to `quads`.
void widen_columns(const uint8_t* pairs, const Group& group, int64_t columns, int8_t* quads) {
  for (int64_t k = 0; k < columns; k += 2 * kQuad, pairs += kQuadBytes, quads += 2 * kQuadBytes) {
    prefetch(pairs);
    const Pair pair = load_pair(pairs);
    store_quad(quads, widen(low(pair), group));
    store_quad(quads + kQuadBytes, widen(high(pair), group));
  }
}

// All of a panel.
void widen_panel(const Weight& weight, int64_t panel, int8_t* quads) {
  const uint8_t *pairs = weight.pairs(panel), *groups = weight.panel_groups(panel);
  for (int64_t k = 0; k < weight.depth; k += weight.group_size, groups += kPanelWidth)
    widen_columns(pairs + k * kPanelWidth / 2, load_group(groups), weight.group_size, quads + k * kPanelWidth);
}

// y of one row and kLanes channels, from the sums of their products.
Floats outputs(const Linear& op, const Floats& x_scale, int64_t channel, const Floats& sums) {
  const Floats y = sums * (x_scale * load(op.weight.scale + channel));
  return op.bias == nullptr ? y : y + load(op.bias + channel);
}

// y of one row and a panel's channels, from int32 or float sums.
template <class Sum>
void write_outputs(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const Sum* sums) {
  const int64_t first = panel * kPanelWidth, width = op.weight.width;
  float* y = op.y + row * width + first;
  if (first + kPanelWidth <= width) {
    for (int64_t n = 0; n < kPanelWidth; n += kLanes)
      store(y + n, outputs(op, broadcast(x.scale[row]), first + n, as_floats(sums + n)));
    return;
  }
  for (int64_t n = 0; n < width - first; ++n) {
    y[n] = static_cast<float>(sums[n]) * (x.scale[row] * op.weight.scale[first + n]);
    if (op.bias != nullptr) y[n] += op.bias[first + n];
  }
}

// What comes of the sums of Rows rows and a panel: with one scale a row they run over the whole depth, else they are gathered group by
// group.
template <int Rows, bool Scaled>
class Outputs {
 public:
  Outputs(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel) : op_(op), x_(x), row_(row), panel_(panel) {}

  // The sum of the values of row m that meet group g.
  int32_t sum_of_x(int m, int64_t g) const { return x_.group_sums[(row_ + m) * x_.num_groups + g]; }

  void add_group(int64_t g, const Products (&sums)[Rows]) {
    const GroupScales scales(op_.weight, panel_, g);
    int32_t whole[kPanelWidth];
    for (int m = 0; m < Rows; ++m) {
      store_products(whole, sums[m]);
      scales.add(totals_[m].part, whole, sum_of_x(m, g));
    }
  }

  void write(const Products (&sums)[Rows]) const {
    for (int m = 0; m < Rows; ++m) {
      if constexpr (Scaled) {
        float total[kPanelWidth];
        for (int i = 0; i < kPanelWidth / kLanes; ++i) store(total + i * kLanes, totals_[m].part[i]);
        write_outputs(op_, x_, row_ + m, panel_, total);
      } else {
        int32_t whole[kPanelWidth];
        store_products(whole, sums[m]);
        write_outputs(op_, x_, row_ + m, panel_, whole);
      }
    }
  }

 private:
  const Linear& op_;
  const RoundedRows& x_;
  const int64_t row_, panel_;
  Totals totals_[Scaled ? Rows : 1] = {};
};

// The products of Rows rows of x with an int8 panel.
template <int Rows, bool Scaled>
void multiply_quads(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const int8_t* quads) {
  Products sums[Rows];
  const int8_t* values = x.values + row * x.stride;
  const int64_t stride = x.stride, columns = Scaled ? op.weight.group_size : op.weight.depth;
  Outputs<Rows, Scaled> y(op, x, row, panel);
  for (int m = 0; m < Rows; ++m) sums[m] = start(x.sum[row + m]);
  for (int64_t k = 0; k < op.weight.depth; k += columns) {
    if constexpr (Scaled)
      for (int m = 0; m < Rows; ++m) sums[m] = start(y.sum_of_x(m, k / columns));
    for (int64_t column = k; column < k + columns; column += kQuad, quads += kQuadBytes) {
      // Of many rows all but the first find the panel in a cache.
      if constexpr (Rows < kBlockRows) prefetch(quads);
      const Quad w = prepared(load_quad(quads));
      for (int m = 0; m < Rows; ++m) add(sums[m], w, values + m * stride + column);
    }
    if constexpr (Scaled) y.add_group(k / columns, sums);
  }
  y.write(sums);
}

// The products of Rows rows of x with a 4-bit panel, straight from the codes.
template <int Rows, bool Scaled>
void multiply_codes(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel) {
  const Weight& weight = op.weight;
  const uint8_t *pairs = weight.pairs(panel), *groups = weight.panel_groups(panel);
  const int8_t* values = x.values + row * x.stride;
  Outputs<Rows, Scaled> y(op, x, row, panel);
  Products sums[Rows];
  for (int m = 0; m < Rows; ++m) sums[m] = no_products();
  for (int64_t g = 0; g < weight.num_groups(); ++g, groups += kPanelWidth) {
    const CodeGroup group = load_code_group(groups);
    for (int m = 0; m < Rows; ++m) {
      if constexpr (Scaled) sums[m] = no_products();
      subtract_offset(sums[m], group, y.sum_of_x(m, g));
    }
    for (int64_t left = weight.group_size / (2 * kQuad); left > 0; left -= kRunPairs) {
      Dots dots[Rows];
      for (int m = 0; m < Rows; ++m) dots[m] = no_dots();
      const auto add_pair = [&] {
        prefetch(pairs);
        const Pair pair = load_pair(pairs);
        for (int m = 0; m < Rows; ++m) add_codes(dots[m], low(pair), high(pair), values + m * x.stride);
        pairs += kQuadBytes, values += 2 * kQuad;
      };
      if (left >= kRunPairs) {
        for (int64_t i = 0; i < kRunPairs; ++i) add_pair();
      } else {
        for (int64_t i = 0; i < left; ++i) add_pair();
      }
      for (int m = 0; m < Rows; ++m) add_dots(sums[m], dots[m], group);
    }
    if constexpr (Scaled) y.add_group(g, sums);
  }
  y.write(sums);
}

// A panel in int8: where it lies, or widened to `scratch`.
const int8_t* whole_panel(const Weight& weight, int64_t panel, int8_t* scratch) {
  if (weight.type == ElementType::kInt8) return weight.panel(panel);
  widen_panel(weight, panel, scratch);
  return scratch;
}

#if defined(__AMX_INT8__)

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
        scales.add(&next, sums[tile] + m * kPanelWidth, *sum_of_x);
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
    for (int64_t panel = first; panel < last; ++panel) widen_panel(op.weight, panel, scratch + (panel - first) * bytes);
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

void tiled_panels(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
  const TileConfig config = config_for(tile_columns(op.weight));
  _tile_loadconfig(&config);
  if (op.weight.type == ElementType::kUint8 && op.rows <= 2 * kTile && groups_fit_units(op.weight)) {
    widening_tiles(op, x, first, last);
  } else {
    cached_tiles(op, x, first, last, scratch);
  }
  _tile_release();
}

#endif

template <bool Scaled>
void row_blocks(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
  for (int64_t panel = first; panel < last; ++panel) {
    if (op.weight.type == ElementType::kUint8 && op.rows <= 2 * kCodeRows) {
      in_blocks<kCodeRows>(0, op.rows, [&](auto rows, int64_t row) { multiply_codes<rows.value, Scaled>(op, x, row, panel); });
    } else {
      const int8_t* quads = whole_panel(op.weight, panel, scratch);
      in_blocks<kBlockRows>(0, op.rows, [&](auto rows, int64_t row) { multiply_quads<rows.value, Scaled>(op, x, row, panel, quads); });
    }
  }
}

}  // namespace

void integer_panels(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
#if defined(__AMX_INT8__)
  if (op.rows >= kFewestTileRows) return tiled_panels(op, x, first, last, scratch);
#endif
  if (op.weight.group_scale != nullptr) return row_blocks<true>(op, x, first, last, scratch);
  row_blocks<false>(op, x, first, last, scratch);
}

// Integer values within +-127 whose largest stands for the largest magnitude of the row. Magnitudes are compared as bits, in which
// a NaN is larger than all.
void round_row(const float* x, int64_t depth, const RoundedRows& rows, int64_t row) {
  constexpr int32_t kInfinity = 0x7f800000, kSmallest = 0x0d800000;  // 2^-100: what is smaller counts as 0
  constexpr int32_t kMagnitude = 0x7fffffff;
  int8_t* values = rows.values + row * rows.stride;
  int32_t most[kLanes] = {};
  int64_t k = 0;
  {
    Ints top{};
    for (; k + kLanes <= depth; k += kLanes) {
      const Ints bits = (Ints)load(x + k) & kMagnitude;
      top = bits > top ? bits : top;
    }
    __builtin_memcpy(most, &top, sizeof top);
  }
  for (; k < depth; ++k) {
    const int32_t bits = static_cast<int32_t>(to_bits(x[k])) & kMagnitude;
    most[0] = bits > most[0] ? bits : most[0];
  }
  int32_t top = most[0];
  for (int i = 1; i < kLanes; ++i) top = most[i] > top ? most[i] : top;

  const bool usable = top >= kSmallest && top < kInfinity;
  const float largest = from_bits(static_cast<uint32_t>(top));
  rows.scale[row] = usable ? largest / 127 : top >= kInfinity ? from_bits(0x7fc00000) : 0;
  rows.sum[row] = 0;
  __builtin_memset(values, 0, static_cast<size_t>(rows.stride));
  int32_t* group_sums = rows.group_sums + row * rows.num_groups;
  __builtin_memset(group_sums, 0, sizeof(int32_t) * static_cast<size_t>(rows.num_groups));
  if (!usable) return;
  // Adding 1.5 * 2^23 leaves the value rounded to nearest even in the last bits.
  constexpr float kRound = 0x1.8p23f;
  const float factor = 127 / largest;
  Ints total{};
  for (k = 0; k + kLanes <= depth; k += kLanes) {
    const Ints whole = (Ints)(load(x + k) * broadcast(factor) + broadcast(kRound)) - (Ints)broadcast(kRound);
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Bytes bytes = __builtin_convertvector(whole, Bytes);
    __builtin_memcpy(values + k, &bytes, sizeof bytes);
    total += whole;
  }
  for (int i = 0; i < kLanes; ++i) rows.sum[row] += total[i];
  for (; k < depth; ++k) {
    const int32_t whole = static_cast<int32_t>(to_bits(x[k] * factor + kRound) - to_bits(kRound));
    values[k] = static_cast<int8_t>(whole);
    rows.sum[row] += whole;
  }
  const int64_t group_size = rows.num_groups > 0 ? rows.stride / rows.num_groups : 0;
  for (int64_t g = 0; g < rows.num_groups; ++g, values += group_size)
    for (k = 0; k < group_size; ++k) group_sums[g] += values[k];
}

}  // namespace qwenrt::QWENRT_ISA

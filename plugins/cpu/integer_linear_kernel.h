// Linear with int8 or 4-bit weights for one instruction set: include after defining QWENRT_ISA.
#include "integer_lanes.h"
#include "lanes.h"
#include "linear.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// How far ahead of their use weights are called for, there being too much work between them for the processor to look so far itself:
// from memory to the second-level cache, and from that to the first, which has too few places for all that is on its way from memory.
constexpr int64_t kFarBytes = 4096, kNearBytes = 256;

void prefetch(const void* p) {
  __builtin_prefetch(static_cast<const char*>(p) + kFarBytes, 0, 2);
  __builtin_prefetch(static_cast<const char*>(p) + kNearBytes, 0, 3);
}

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
Floats outputs(const Linear& op, const Floats& x_scale, int64_t channel, const int32_t* sums) {
  Ints whole;
  __builtin_memcpy(&whole, sums, sizeof whole);
  const Floats y = __builtin_convertvector(whole, Floats) * (x_scale * load(op.weight.scale + channel));
  return op.bias == nullptr ? y : y + load(op.bias + channel);
}

// y of one row and a panel's channels.
void write_outputs(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const int32_t* sums) {
  const int64_t first = panel * kPanelWidth, width = op.weight.width;
  float* y = op.y + row * width + first;
  if (first + kPanelWidth <= width) {
    for (int64_t n = 0; n < kPanelWidth; n += kLanes) store(y + n, outputs(op, broadcast(x.scale[row]), first + n, sums + n));
    return;
  }
  for (int64_t n = 0; n < width - first; ++n) {
    y[n] = static_cast<float>(sums[n]) * (x.scale[row] * op.weight.scale[first + n]);
    if (op.bias != nullptr) y[n] += op.bias[first + n];
  }
}

template <int Rows>
void write_products(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const Products (&sums)[Rows]) {
  for (int m = 0; m < Rows; ++m) {
    int32_t whole[kPanelWidth];
    store_products(whole, sums[m]);
    write_outputs(op, x, row + m, panel, whole);
  }
}

// The products of Rows rows of x with an int8 panel.
template <int Rows>
void multiply_quads(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const int8_t* quads) {
  Products sums[Rows];
  const int8_t* values = x.values + row * x.stride;
  const int64_t stride = x.stride;
  for (int m = 0; m < Rows; ++m) sums[m] = start(x.sum[row + m]);
  for (int64_t k = 0; k < op.weight.depth; k += kQuad, quads += kQuadBytes) {
    // Of many rows all but the first find the panel in a cache.
    if constexpr (Rows < kBlockRows) prefetch(quads);
    const Quad w = prepared(load_quad(quads));
    for (int m = 0; m < Rows; ++m) add(sums[m], w, values + m * stride + k);
  }
  write_products(op, x, row, panel, sums);
}

// The products of Rows rows of x with a 4-bit panel, straight from the codes.
template <int Rows>
void multiply_codes(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel) {
  const Weight& weight = op.weight;
  const uint8_t *pairs = weight.pairs(panel), *groups = weight.panel_groups(panel);
  const int8_t* values = x.values + row * x.stride;
  const int32_t* group_sums = x.group_sums + row * weight.num_groups();
  Products sums[Rows];
  for (int m = 0; m < Rows; ++m) sums[m] = no_products();
  for (int64_t g = 0; g < weight.num_groups(); ++g, groups += kPanelWidth) {
    const CodeGroup group = load_code_group(groups);
    for (int m = 0; m < Rows; ++m) subtract_offset(sums[m], group, group_sums[m * weight.num_groups() + g]);
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
  }
  write_products(op, x, row, panel, sums);
}

// A panel in int8: where it lies, or widened to `scratch`.
const int8_t* whole_panel(const Weight& weight, int64_t panel, int8_t* scratch) {
  if (weight.type == ElementType::kInt8) return weight.panel(panel);
  widen_panel(weight, panel, scratch);
  return scratch;
}

#if defined(__AMX_INT8__)

constexpr int64_t kTile = 16;  // rows of a tile; a row is 64 bytes
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

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTileConfig;

// y of up to 16 rows and a panel's channels.
void write_tile(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const int32_t* sums) {
  const int64_t rows = op.rows - row < kTile ? op.rows - row : kTile, first = panel * kPanelWidth, width = op.weight.width;
  if (first + kPanelWidth > width) {
    for (int64_t m = 0; m < rows; ++m) write_outputs(op, x, row + m, panel, sums + m * kPanelWidth);
    return;
  }
  static_assert(kLanes == kPanelWidth);
  const Floats scale = load(op.weight.scale + first);
  float* y = op.y + row * width + first;
  for (int64_t m = 0; m < rows; ++m, y += width, sums += kPanelWidth) {
    const Floats product = _mm512_cvtepi32_ps(_mm512_load_si512(sums)) * (broadcast(x.scale[row + m]) * scale);
    store(y, op.bias == nullptr ? product : product + load(op.bias + first));
  }
}

constexpr int64_t kUnitBytes = kPanelWidth * kDepthUnit;

// Columns [k, k + 64) of two panels, int8.
struct Units {
  const int8_t *left, *right;
};

// Two panels, or one twice unless `both`, by one or two tiles of rows: tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 columns of the
// panels, which units(k) gives.
template <bool TwoTiles, class GetUnits>
void multiply_tiles(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, bool both, const GetUnits& units) {
  const int8_t* values = x.values + row * x.stride;
  const int64_t stride = x.stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TwoTiles) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < op.weight.depth; k += kDepthUnit) {
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
  alignas(64) int32_t sums[4][kTile * kPanelWidth];
  _tile_stored(0, sums[0], kQuadBytes);
  _tile_stored(1, sums[1], kQuadBytes);
  write_tile(op, x, row, panel, sums[0]);
  if (both) write_tile(op, x, row, panel + 1, sums[1]);
  if constexpr (TwoTiles) {
    _tile_stored(2, sums[2], kQuadBytes);
    _tile_stored(3, sums[3], kQuadBytes);
    write_tile(op, x, row + kTile, panel, sums[2]);
    if (both) write_tile(op, x, row + kTile, panel + 1, sums[3]);
  }
}

template <class GetUnits>
void multiply_two_panels(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, bool both, const GetUnits& units) {
  if (row + kTile < op.rows) {
    multiply_tiles<true>(op, x, row, panel, both, units);
  } else {
    multiply_tiles<false>(op, x, row, panel, both, units);
  }
}

// A tile is loaded from what was written just now, which the compiler is not told.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// One or two tiles of rows pass but once: codes are widened just before their product, so that memory never rests.
void widening_tiles(const Linear& op, const RoundedRows& x, int64_t first, int64_t last) {
  alignas(64) int8_t ring[2][2][kUnitBytes];
  for (int64_t panel = first; panel < last; panel += 2) {
    const int64_t right = panel + 1 < last ? panel + 1 : panel;
    multiply_two_panels(op, x, 0, panel, right != panel, [&](int64_t k) -> Units {
      auto& units = ring[k / kDepthUnit % 2];
      widen_unit(op.weight, panel, k, units[0]);
      widen_unit(op.weight, right, k, units[1]);
      finish_stores();
      return {units[0], units[1]};
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
  _tile_loadconfig(&kTileConfig);
  if (op.weight.type == ElementType::kUint8 && op.rows <= 2 * kTile && groups_fit_units(op.weight)) {
    widening_tiles(op, x, first, last);
  } else {
    cached_tiles(op, x, first, last, scratch);
  }
  _tile_release();
}

#endif

}  // namespace

void integer_panels(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
#if defined(__AMX_INT8__)
  if (op.rows >= kFewestTileRows) return tiled_panels(op, x, first, last, scratch);
#endif
  for (int64_t panel = first; panel < last; ++panel) {
    if (op.weight.type == ElementType::kUint8 && op.rows <= 2 * kCodeRows) {
      in_blocks<kCodeRows>(0, op.rows, [&](auto rows, int64_t row) { multiply_codes<rows.value>(op, x, row, panel); });
    } else {
      const int8_t* quads = whole_panel(op.weight, panel, scratch);
      in_blocks<kBlockRows>(0, op.rows, [&](auto rows, int64_t row) { multiply_quads<rows.value>(op, x, row, panel, quads); });
    }
  }
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

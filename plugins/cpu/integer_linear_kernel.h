// Linear with int8 or 4-bit weights for one instruction set: include after defining QWENRT_ISA.
#include "integer_lanes.h"
#include "lanes.h"
#include "linear.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// Calls each(quad, its number) for the quads of an int8 panel.
template <class Each>
void for_quads(const Weight& weight, const int8_t* panel, const Each& each) {
  for (int64_t q = 0; q < weight.quads(); ++q) each(load_quad(panel + q * kQuadBytes), q);
}

// The same for panel `number` of a 4-bit weight.
template <class Each>
void for_widened_quads(const Weight& weight, int64_t number, const Each& each) {
  const uint8_t *pairs = weight.pairs(number), *groups = weight.panel_groups(number);
  const int64_t group_quads = weight.group_size / kQuad;
  for (int64_t first = 0; first < weight.quads(); first += group_quads, groups += kPanelWidth) {
    const Group group = load_group(groups);
    for (int64_t q = first; q < first + group_quads; q += 2, pairs += kQuadBytes) {
      const Pair pair = load_pair(pairs);
      each(widen(low(pair), group), q);
      each(widen(high(pair), group), q + 1);
    }
  }
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

// The products of Rows rows of x with a panel whose quads `walk` gives.
template <int Rows, class Walk>
void multiply_rows(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const Walk& walk) {
  Products sums[Rows];
  const int8_t* values = x.values + row * x.stride;
  const int64_t stride = x.stride;
  for (int m = 0; m < Rows; ++m) sums[m] = start(x.sum[row + m]);
  walk([&](const Quad& weights, int64_t quad) {
    const Quad w = prepared(weights);
    for (int m = 0; m < Rows; ++m) add(sums[m], w, values + m * stride + quad * kQuad);
  });
  for (int m = 0; m < Rows; ++m) {
    int32_t whole[kPanelWidth];
    store_products(whole, sums[m]);
    write_outputs(op, x, row + m, panel, whole);
  }
}

// The same for `rows` rows, at most Rows.
template <int Rows, class Walk>
void multiply_up_to(const Linear& op, const RoundedRows& x, int64_t row, int64_t rows, int64_t panel, const Walk& walk) {
  if (rows == Rows) return multiply_rows<Rows>(op, x, row, panel, walk);
  if constexpr (Rows > 1) multiply_up_to<Rows - 1>(op, x, row, rows, panel, walk);
}

template <class Walk>
void multiply_all(const Linear& op, const RoundedRows& x, int64_t panel, const Walk& walk) {
  int64_t row = 0;
  for (; row + kBlockRows <= op.rows; row += kBlockRows) multiply_rows<kBlockRows>(op, x, row, panel, walk);
  if (row < op.rows) multiply_up_to<kBlockRows - 1>(op, x, row, op.rows - row, panel, walk);
}

// A panel in int8: where it lies, or widened to `scratch`.
const int8_t* whole_panel(const Weight& weight, int64_t panel, int8_t* scratch) {
  if (weight.type == ElementType::kInt8) return weight.panel(panel);
  for_widened_quads(weight, panel, [&](const Quad& quad, int64_t q) { store_quad(scratch + q * kQuadBytes, quad); });
  return scratch;
}

#if defined(__AMX_INT8__)

constexpr int64_t kTile = 16;  // rows of a tile; a row is 64 bytes
// For fewer rows, tiles do more work than they save.
constexpr int64_t kFewestTileRows = 8;

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTileConfig;

void write_tile(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const int32_t* sums) {
  for (int64_t m = 0; m < kTile && row + m < op.rows; ++m) write_outputs(op, x, row + m, panel, sums + m * kPanelWidth);
}

// Two panels by one or two tiles of rows: tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 columns of the panels.
template <bool TwoTiles>
void multiply_tiles(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, const int8_t* left, const int8_t* right) {
  const int8_t* values = x.values + row * x.stride;
  const int64_t stride = x.stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (TwoTiles) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < op.weight.depth; k += kDepthUnit) {
    _tile_loadd(4, values + k, stride);
    _tile_loadd(6, left + k * kPanelWidth, kQuadBytes);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, right + k * kPanelWidth, kQuadBytes);
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
  if (right != left) write_tile(op, x, row, panel + 1, sums[1]);
  if constexpr (TwoTiles) {
    _tile_stored(2, sums[2], kQuadBytes);
    _tile_stored(3, sums[3], kQuadBytes);
    write_tile(op, x, row + kTile, panel, sums[2]);
    if (right != left) write_tile(op, x, row + kTile, panel + 1, sums[3]);
  }
}

void tiled_panels(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
  _tile_loadconfig(&kTileConfig);
  for (int64_t panel = first; panel < last; panel += 2) {
    const int8_t* left = whole_panel(op.weight, panel, scratch);
    const int8_t* right = panel + 1 < last ? whole_panel(op.weight, panel + 1, scratch + op.weight.depth * kPanelWidth) : left;
    // The compiler is not told that tiles are loaded from what was written just now.
    __asm__ volatile("" ::: "memory");
    int64_t row = 0;
    for (; row + kTile < op.rows; row += 2 * kTile) multiply_tiles<true>(op, x, row, panel, left, right);
    if (row < op.rows) multiply_tiles<false>(op, x, row, panel, left, right);
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
    if (op.weight.type == ElementType::kUint8 && op.rows <= kBlockRows) {
      multiply_up_to<kBlockRows>(op, x, 0, op.rows, panel, [&](const auto& each) { for_widened_quads(op.weight, panel, each); });
    } else {
      const int8_t* quads = whole_panel(op.weight, panel, scratch);
      multiply_all(op, x, panel, [&](const auto& each) { for_quads(op.weight, quads, each); });
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
}

}  // namespace qwenrt::QWENRT_ISA

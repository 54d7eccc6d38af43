// Products of rows with int8 or 4-bit panels for one instruction set: include after defining QWENRT_ISA.
#pragma once

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
}  // namespace qwenrt::QWENRT_ISA

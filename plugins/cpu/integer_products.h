// Products of rows with int8 or 4-bit panels for one instruction set: include after defining QWENRT_ISA.
#pragma once

#include "integer_lanes.h"
#include "isa.h"
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

// What comes of the sums of up to Rows rows and Panels panels: with one scale a row they run over the whole depth, else they are
// gathered group by group.
template <int Rows, int Panels, bool Scaled>
class Outputs {
 public:
  Outputs(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, int64_t panels)
      : op_(op), x_(x), row_(row), rows_(op.rows - row < Rows ? op.rows - row : Rows), panel_(panel), panels_(panels) {}

  // The sum of the values of row m that meet group g.
  int32_t sum_of_x(int m, int64_t g) const { return x_.group_sums[(row_ + m) * x_.num_groups + g]; }

  void add_group(int64_t g, const Products (&sums)[Rows][Panels]) {
    int32_t whole[kPanelWidth];
    for (int n = 0; n < panels_; ++n) {
      const GroupScales scales(op_.weight, panel_ + n, g);
      for (int m = 0; m < rows_; ++m) {
        store_products(whole, sums[m][n]);
        scales.add(totals_[m][n].part, whole, sum_of_x(m, g));
      }
    }
  }

  void write(const Products (&sums)[Rows][Panels]) const {
    for (int m = 0; m < rows_; ++m) {
      for (int n = 0; n < panels_; ++n) {
        if constexpr (Scaled) {
          float total[kPanelWidth];
          for (int i = 0; i < kPanelWidth / kLanes; ++i) store(total + i * kLanes, totals_[m][n].part[i]);
          write_outputs(op_, x_, row_ + m, panel_ + n, total);
        } else {
          int32_t whole[kPanelWidth];
          store_products(whole, sums[m][n]);
          write_outputs(op_, x_, row_ + m, panel_ + n, whole);
        }
      }
    }
  }

 private:
  const Linear& op_;
  const RoundedRows& x_;
  const int64_t row_, rows_, panel_, panels_;
  Totals totals_[Scaled ? Rows : 1][Scaled ? Panels : 1] = {};
};

// Panels that are multiplied together: their columns come in steps of two quads, ready for `add`. A missing last one is the one before
// it once more.
constexpr int64_t kStep = 2 * kQuad;
template <int Panels>
using Step = Quad[2][Panels];

// Panels in int8, `panel_bytes` apart.
template <int Panels>
class QuadSteps {
 public:
  QuadSteps(const int8_t* quads, int64_t panel_bytes, bool in_memory) : quads_(quads), panel_bytes_(panel_bytes), in_memory_(in_memory) {}

  void enter(int64_t) {}
  void next(Step<Panels>& w) {
    for (int n = 0; n < Panels; ++n) {
      const int8_t* quads = quads_ + n * panel_bytes_;
      if (in_memory_) prefetch(quads), prefetch(quads + kQuadBytes);
      w[0][n] = prepared(load_quad(quads)), w[1][n] = prepared(load_quad(quads + kQuadBytes));
    }
    quads_ += 2 * kQuadBytes;
  }

 private:
  const int8_t* quads_;
  const int64_t panel_bytes_;
  const bool in_memory_;
};

// Panels of 4-bit codes, widened on their way.
template <int Panels>
class WideningSteps {
 public:
  WideningSteps(const Weight& weight, int64_t panel, int64_t panels, bool in_memory)
      : pairs_(weight.pairs(panel)),
        groups_(weight.panel_groups(panel)),
        pairs_apart_(panels > 1 ? weight.panel_bytes() : 0),
        groups_apart_(panels > 1 ? weight.num_groups() * kPanelWidth : 0),
        in_memory_(in_memory) {}

  void enter(int64_t g) {
    for (int n = 0; n < Panels; ++n) group_[n] = prepared(load_group(groups_ + n * groups_apart_ + g * kPanelWidth));
  }
  void next(Step<Panels>& w) {
    for (int n = 0; n < Panels; ++n) {
      if (in_memory_) prefetch(pairs_ + n * pairs_apart_);
      const Pair pair = load_pair(pairs_ + n * pairs_apart_);
      w[0][n] = widen(low(pair), group_[n]), w[1][n] = widen(high(pair), group_[n]);
    }
    pairs_ += kQuadBytes;
  }

 private:
  const uint8_t *pairs_, *groups_;
  const int64_t pairs_apart_, groups_apart_;
  const bool in_memory_;
  Group group_[Panels];
};

// The products of Rows rows of x with Panels panels, whose columns are in groups of `columns`. Loops over rows and panels are unrolled
// by force: GCC 12 gives that up beyond 16 sums, and keeps them in memory then.
template <int Rows, int Panels, bool Scaled, class Steps>
void multiply_block(const RoundedRows& x, int64_t row, int64_t depth, int64_t columns, Steps steps, Outputs<Rows, Panels, Scaled> y) {
  Products sums[Rows][Panels];
  const auto clear = [&](const auto& sum_of_x) {
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < Panels; ++n) sums[m][n] = start(sum_of_x(m));
  };
  // One pointer for three rows, since an address may be p, p + stride or p + 2 * stride. The empty asm hides how the pointers are related:
  // GCC would keep a distance for each row, more than there are registers.
  const int64_t stride = x.stride;
  constexpr int kPointers = (Rows + 2) / 3;
  const int8_t* values[kPointers];
  for (int i = 0; i < kPointers; ++i) values[i] = x.values + (row + 3 * i) * stride;
  if constexpr (!Scaled) clear([&](int m) { return x.sum[row + m]; });
  for (int64_t g = 0; g * columns < depth; ++g) {
    if constexpr (Scaled) clear([&](int m) { return y.sum_of_x(m, g); });
    steps.enter(g);
    for (int64_t left = columns / kStep; left > 0; --left) {
      Step<Panels> w;
      steps.next(w);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
#pragma GCC unroll 16
        for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
          for (int n = 0; n < Panels; ++n) add(sums[m][n], w[i][n], values[m / 3] + m % 3 * stride + i * kQuad);
#pragma GCC unroll 8
      for (int i = 0; i < kPointers; ++i) {
        const int8_t* next = values[i] + kStep;
        asm("" : "+r"(next));
        values[i] = next;
      }
    }
    if constexpr (Scaled) y.add_group(g, sums);
  }
  y.write(sums);
}

// The products of Rows rows of x with a 4-bit panel, straight from the codes.
template <int Rows, bool Scaled>
void multiply_codes(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel) {
  const Weight& weight = op.weight;
  const uint8_t *pairs = weight.pairs(panel), *groups = weight.panel_groups(panel);
  const int8_t* values = x.values + row * x.stride;
  Outputs<Rows, 1, Scaled> y(op, x, row, panel, 1);
  Products sums[Rows][1];
  for (int m = 0; m < Rows; ++m) sums[m][0] = no_products();
  for (int64_t g = 0; g < weight.num_groups(); ++g, groups += kPanelWidth) {
    const CodeGroup group = load_code_group(groups);
    for (int m = 0; m < Rows; ++m) {
      if constexpr (Scaled) sums[m][0] = no_products();
      subtract_offset(sums[m][0], group, y.sum_of_x(m, g));
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
      for (int m = 0; m < Rows; ++m) add_dots(sums[m][0], dots[m], group);
    }
    if constexpr (Scaled) y.add_group(g, sums);
  }
  y.write(sums);
}

// Panels [first, last) by the block of Rows rows from `row` on. get_steps makes the steps of that many panels from one on; in_memory says
// that no rows before these have brought them to a cache.
template <int Rows, int Panels, bool Scaled, class GetSteps>
void multiply_rows(const Linear& op, const RoundedRows& x, int64_t row, int64_t first, int64_t last, int64_t columns, const GetSteps& get_steps) {
  for (int64_t panel = first; panel < last; panel += Panels) {
    const int64_t panels = last - panel < Panels ? last - panel : Panels;
    multiply_block(x, row, op.weight.depth, columns, get_steps(Count<Panels>{}, panel, panels, row == 0),
                   Outputs<Rows, Panels, Scaled>(op, x, row, panel, panels));
  }
}

// By all rows. A block of them finds x in the first-level cache and the panels, which are a task's, in the second, and writes y in long
// stretches. Up to kWideRows rows go in one pass, with what is beyond them computed and left out: while the first of several passes waits
// for memory, the others have nothing to do.
template <bool Scaled, class GetSteps>
void multiply_all_rows(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int64_t columns, const GetSteps& get_steps) {
  if constexpr (kWideRows > 0) {
    static_assert(kWideRows <= kRowsUnit);
    if (op.rows > kBlockRows && op.rows <= kWideRows) return multiply_rows<kWideRows, 1, Scaled>(op, x, 0, first, last, columns, get_steps);
  }
  in_blocks<kBlockRows>(0, op.rows, [&](auto rows, int64_t row) {
    multiply_rows<rows.value, kBlockPanels, Scaled>(op, x, row, first, last, columns, get_steps);
  });
}

template <bool Scaled>
void multiply_panels(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
  const Weight& weight = op.weight;
  const int64_t bytes = weight.depth * kPanelWidth;
  const bool codes = weight.type == ElementType::kUint8;
  if constexpr (kWideRows > 0) {
    if (codes && op.rows <= kWideRows)
      return multiply_all_rows<Scaled>(op, x, first, last, weight.group_size, [&](auto most, int64_t panel, int64_t panels, bool in_memory) {
        return WideningSteps<most.value>(weight, panel, panels, in_memory);
      });
  }
  if (codes)
    for (int64_t panel = first; panel < last; ++panel) widen_panel(weight, panel, scratch + (panel - first) * bytes);
  const int8_t* quads = codes ? scratch : weight.panel(first);
  const int64_t columns = Scaled ? weight.group_size : weight.depth;
  multiply_all_rows<Scaled>(op, x, first, last, columns, [&](auto most, int64_t panel, int64_t panels, bool in_memory) {
    return QuadSteps<most.value>(quads + (panel - first) * bytes, panels > 1 ? bytes : 0, in_memory && !codes);
  });
}

template <bool Scaled>
void row_blocks(const Linear& op, const RoundedRows& x, int64_t first, int64_t last, int8_t* scratch) {
  if (op.weight.type != ElementType::kUint8 || op.rows > kMostCodeRows) return multiply_panels<Scaled>(op, x, first, last, scratch);
  for (int64_t panel = first; panel < last; ++panel)
    in_blocks<kCodeRows>(0, op.rows, [&](auto rows, int64_t row) { multiply_codes<rows.value, Scaled>(op, x, row, panel); });
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

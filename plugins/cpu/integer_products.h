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
constexpr int64_t kFarBytes = 4096, kNearBytes = 256, kLine = 64;

void prefetch(const void* p) {
  __builtin_prefetch(static_cast<const char*>(p) + kFarBytes, 0, 2);
  __builtin_prefetch(static_cast<const char*>(p) + kNearBytes, 0, 3);
}

// What is called for while panels are read: nothing; they themselves; or others, so that memory does not rest while these are in a cache.
class Ahead {
 public:
  Ahead() = default;
  static Ahead themselves() {
    Ahead ahead;
    ahead.themselves_ = true;
    return ahead;
  }
  // The i-th of `parts` parts of `bytes` bytes, while `lines` lines are read.
  static Ahead others(const void* data, int64_t bytes, int64_t i, int64_t parts, int64_t lines) {
    Ahead ahead;
    ahead.at_ = static_cast<const char*>(data) + bytes / parts * i;
    ahead.step_ = (bytes + parts * lines - 1) / (parts * lines);
    return ahead;
  }

  // To be called with every line that is read.
  void next(const void* line) {
    if (themselves_) {
      prefetch(line);
    } else if (at_ != nullptr) {
      __builtin_prefetch(at_, 0, 2);
      at_ += step_;
    }
  }

 private:
  bool themselves_ = false;
  const char* at_ = nullptr;
  int64_t step_ = 0;
};

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

// A panel's channels in kPanelWidth / kLanes vectors.
void as_floats(const Products& sums, Floats* out) {
  typedef Ints Whole[kPanelWidth / kLanes];
  Whole whole;
  static_assert(sizeof whole == sizeof sums);
  __builtin_memcpy(whole, &sums, sizeof whole);
  for (int i = 0; i < kPanelWidth / kLanes; ++i) out[i] = __builtin_convertvector(whole[i], Floats);
}

// What a panel's group, the g-th, has beside its integers.
struct GroupScales {
  const float *scale, *offset;

  GroupScales(const Weight& weight, int64_t panel, int64_t g)
      : scale(weight.group_scale + weight.panel_start(panel) + g * kPanelWidth),
        offset(weight.group_offset == nullptr ? nullptr : scale - weight.group_scale + weight.group_offset) {}

  // Adds the products of a group to those of the groups before it, of a panel's channels: in this order on every path, so that a row's
  // bits do not depend on it.
  void add(Floats* totals, const Products& sums, int32_t sum_of_x) const {
    Floats products[kPanelWidth / kLanes];
    as_floats(sums, products);
    for (int i = 0; i < kPanelWidth / kLanes; ++i) {
      totals[i] = multiply_add(products[i], load(scale + i * kLanes), totals[i]);
      if (offset != nullptr) totals[i] = multiply_add(broadcast(static_cast<float>(sum_of_x)), load(offset + i * kLanes), totals[i]);
    }
  }
};

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

  // Rows and panels that only fill the block may have any sums, and unrolled loops leave the others' in registers.
  void add_group(int64_t g, const Products (&sums)[Rows][Panels]) {
#pragma GCC unroll 4
    for (int n = 0; n < Panels; ++n) {
      const GroupScales scales(op_.weight, panel_ + (n < panels_ ? n : 0), g);
#pragma GCC unroll 16
      for (int m = 0; m < Rows; ++m) scales.add(totals_[m][n].part, sums[m][n], sum_of_x(m, g));
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

// Columns that are multiplied in one turn of a loop.
constexpr int64_t kStep = 2 * kQuad;

// Steps of panels in int8, `panel_bytes` apart.
template <int Panels>
class QuadSteps {
 public:
  QuadSteps(const int8_t* quads, int64_t panel_bytes, const Ahead& ahead) : quads_(quads), panel_bytes_(panel_bytes), ahead_(ahead) {}

  void enter(int64_t) {}
  void part(int i, Part (&w)[Panels]) const {
    for (int n = 0; n < Panels; ++n) w[n] = load_part(quads_ + n * panel_bytes_, i);
  }
  void advance() {
    for (int n = 0; n < Panels; ++n) ahead_.next(quads_ + n * panel_bytes_), ahead_.next(quads_ + n * panel_bytes_ + kQuadBytes);
    quads_ += 2 * kQuadBytes;
  }

 private:
  const int8_t* quads_;
  const int64_t panel_bytes_;
  Ahead ahead_;
};

// Where Rows rows of x are read: one pointer for three, since an address may be p, p + stride or p + 2 * stride. The empty asm hides how
// the pointers are related: GCC would keep a distance for each row, more than there are registers.
template <int Rows>
class RowCursors {
 public:
  RowCursors(const RoundedRows& x, int64_t row) : stride_(x.stride) {
    for (int i = 0; i < kPointers; ++i) values_[i] = x.values + (row + 3 * i) * stride_;
  }

  const int8_t* operator[](int m) const { return values_[m / 3] + m % 3 * stride_; }

  void advance(int64_t bytes) {
#pragma GCC unroll 8
    for (int i = 0; i < kPointers; ++i) {
      const int8_t* next = values_[i] + bytes;
      asm("" : "+r"(next));
      values_[i] = next;
    }
  }

 private:
  static constexpr int kPointers = (Rows + 2) / 3;
  const int8_t* values_[kPointers];
  const int64_t stride_;
};

// The products of Rows rows of x with Panels panels, whose columns are in groups of `columns`. Loops over rows and panels are unrolled
// by force: GCC 12 gives that up beyond 16 sums, and keeps them in memory then.
template <int Rows, int Panels, bool Scaled, class Steps>
void multiply_block(const RoundedRows& x, int64_t row, int64_t depth, int64_t columns, Steps steps, Outputs<Rows, Panels, Scaled> y) {
  Products sums[Rows][Panels];
  const auto each = [&](const auto& work) {
#pragma GCC unroll 16
    for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < Panels; ++n) work(m, n);
  };
  if constexpr (!Scaled) each([&](int m, int n) { sums[m][n] = start(x.sum[row + m]); });
  RowCursors<Rows> values(x, row);
  for (int64_t g = 0; g * columns < depth; ++g) {
    steps.enter(g);
    // What nothing else can reach stays in registers.
    Products local[Rows][Panels];
    each([&](int m, int n) { local[m][n] = Scaled ? start(y.sum_of_x(m, g)) : sums[m][n]; });
    for (int64_t left = columns / kStep; left > 0; --left) {
#pragma GCC unroll 4
      for (int i = 0; i < kStepParts; ++i) {
        Part w[Panels];
        steps.part(i, w);
#pragma GCC unroll 16
        for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
          for (int n = 0; n < Panels; ++n) add(local[m][n], w[n], values[m] + i * kPartBytes);
      }
      steps.advance();
      values.advance(kStepParts * kPartBytes);
    }
    if constexpr (Scaled) {
      y.add_group(g, local);
    } else {
      each([&](int m, int n) { sums[m][n] = local[m][n]; });
    }
  }
  y.write(sums);
}

// The products of Rows rows of x with a 4-bit panel, straight from the codes.
template <int Rows, bool Scaled>
void multiply_codes(const Linear& op, const RoundedRows& x, int64_t row, int64_t panel, Ahead ahead) {
  const Weight& weight = op.weight;
  const uint8_t *pairs = weight.pairs(panel), *groups = weight.panel_groups(panel);
  RowCursors<Rows> values(x, row);
  const int32_t* minus_sums = x.minus_sums + row * x.num_runs;
  Outputs<Rows, 1, Scaled> y(op, x, row, panel, 1);
  Products sums[Rows][1];
  for (int m = 0; m < Rows; ++m) sums[m][0] = no_products();
  for (int64_t g = 0; g * weight.group_size < weight.depth; ++g, groups += kPanelWidth) {
    const CodeGroup group = load_code_group(groups);
    if constexpr (Scaled)
      for (int m = 0; m < Rows; ++m) sums[m][0] = no_products();
    for (int64_t left = weight.group_size / kStep; left > 0; left -= kRunSteps, ++minus_sums) {
      Dots dots[Rows];
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) dots[m] = start_dots(group, minus_sums[m * x.num_runs]);
      for (int64_t i = left < kRunSteps ? left : kRunSteps; i > 0; --i) {
        ahead.next(pairs);
        const auto both = load_codes(pairs);
#pragma GCC unroll 8
        for (int m = 0; m < Rows; ++m) add_codes(dots[m], low(both), values[m]);
#pragma GCC unroll 8
        for (int m = 0; m < Rows; ++m) add_codes(dots[m], high(both), values[m] + kQuad);
        pairs += kQuadBytes;
        values.advance(kStep);
      }
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) add_dots(sums[m][0], dots[m], group);
    }
    if constexpr (Scaled) y.add_group(g, sums);
  }
  y.write(sums);
}

// Up to so many rows are done while memory brings the next panels; with more, that would be soon over.
constexpr int64_t kFewRows = 64;

// The panels of a task, Panels at a time, by all rows, Rows at a time: calls work(Count<rows>, row, panel, panels, ahead). A block of rows
// finds x in the first-level cache and the panels in the second, and writes y in long stretches. `widened`: what is read are panels in
// int8, which are in a cache already.
template <int Rows, int Panels, class Work>
void for_blocks(const Linear& op, const PanelTask& task, bool widened, const Work& work) {
  const Weight& weight = op.weight;
  const int64_t panel_lines = (widened ? weight.depth * kPanelWidth : weight.panel_bytes()) / kLine;
  const int64_t blocks = (task.last - task.first + Panels - 1) / Panels, parts = (op.rows - 1) / Rows * blocks;
  const bool others = task.next < task.next_last && op.rows <= kFewRows && weight.depth > 0;
  int64_t part = -blocks;  // the first rows bring the panels themselves
  in_blocks<Rows>(0, op.rows, [&](auto rows, int64_t row) {
    for (int64_t panel = task.first; panel < task.last; panel += Panels, ++part) {
      const int64_t panels = task.last - panel < Panels ? task.last - panel : Panels;
      Ahead ahead;
      if (row == 0) {
        if (!widened) ahead = Ahead::themselves();
      } else if (others) {
        ahead = Ahead::others(weight.panel(task.next), (task.next_last - task.next) * weight.panel_bytes(), part, parts, panels * panel_lines);
      }
      work(rows, row, panel, panels, ahead);
    }
  });
}

// Panels of a task by all rows. get_steps makes the steps of that many panels from one on. Up to kWideRows rows go in one pass, with what
// is beyond them computed and left out.
template <bool Scaled, class GetSteps>
void multiply_all_rows(const Linear& op, const RoundedRows& x, const PanelTask& task, int64_t columns, bool widened, const GetSteps& get_steps) {
  const auto multiply = [&](auto rows, auto most, int64_t row, int64_t panel, int64_t panels, const Ahead& ahead) {
    multiply_block(x, row, op.weight.depth, columns, get_steps(most, panel, panels, ahead),
                   Outputs<rows.value, most.value, Scaled>(op, x, row, panel, panels));
  };
  if constexpr (kWideRows > 0) {
    static_assert(kWideRows <= kRowsUnit);
    if (op.rows > kBlockRows && op.rows <= kWideRows) {
      for (int64_t panel = task.first; panel < task.last; ++panel) multiply(Count<kWideRows>{}, Count<1>{}, 0, panel, 1, Ahead::themselves());
      return;
    }
  }
  for_blocks<kBlockRows, kBlockPanels>(op, task, widened, [&](auto rows, int64_t row, int64_t panel, int64_t panels, const Ahead& ahead) {
    multiply(rows, Count<kBlockPanels>{}, row, panel, panels, ahead);
  });
}

// Panels of int8.
template <bool Scaled>
void multiply_quads(const Linear& op, const RoundedRows& x, const PanelTask& task) {
  const Weight& weight = op.weight;
  multiply_all_rows<Scaled>(op, x, task, Scaled ? weight.group_size : weight.depth, false,
                            [&](auto most, int64_t panel, int64_t panels, const Ahead& ahead) {
                              return QuadSteps<most.value>(weight.panel(panel), panels > 1 ? weight.panel_bytes() : 0, ahead);
                            });
}

template <bool Scaled>
void multiply_all_codes(const Linear& op, const RoundedRows& x, const PanelTask& task) {
  for_blocks<kCodeRows, 1>(op, task, false, [&](auto rows, int64_t row, int64_t panel, int64_t, const Ahead& ahead) {
    multiply_codes<rows.value, Scaled>(op, x, row, panel, ahead);
  });
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

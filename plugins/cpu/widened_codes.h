// 4-bit codes as int8, for AVX-512: where products of 8 bits are the fastest, widening pays with more than a few rows.
#pragma once

#include "integer_products.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// Multipliers m and m * z of a panel's 16 channels, each for a quad.
struct Group {
  __m512i multiplier, offset;
};

Group load_group(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i fours = _mm512_shuffle_epi8(bytes, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
  const __m512i multiplier = _mm512_and_si512(fours, _mm512_set1_epi16(15));
  return {multiplier, _mm512_mullo_epi16(high(fours), multiplier)};
}

// A group of which `widen` makes raised quads.
Group raised(const Group& g) { return {g.multiplier, _mm512_add_epi8(g.offset, _mm512_set1_epi8(-128))}; }

// (code - z) * m. The product of a code and m is at most 225, so one 16-bit multiplication does two bytes.
__m512i widen(Codes codes, const Group& g) { return _mm512_sub_epi8(_mm512_mullo_epi16(codes, g.multiplier), g.offset); }

// Columns of a 4-bit panel, all of one group, in int8, to `quads`.
void widen_columns(const uint8_t* pairs, const Group& group, int64_t columns, int8_t* quads) {
  for (int64_t k = 0; k < columns; k += kStep, pairs += kQuadBytes, quads += 2 * kQuadBytes) {
    prefetch(pairs);
    const __m512i both = load_codes(pairs);
    _mm512_storeu_si512(quads, widen(low(both), group));
    _mm512_storeu_si512(quads + kQuadBytes, widen(high(both), group));
  }
}

// Panels [first, last) to `quads`.
void widen_panels(const Weight& weight, int64_t first, int64_t last, int8_t* quads) {
  for (int64_t panel = first; panel < last; ++panel) {
    const uint8_t *pairs = weight.pairs(panel), *groups = weight.panel_groups(panel);
    for (int64_t k = 0; k < weight.depth; k += weight.group_size, groups += kPanelWidth, quads += weight.group_size * kPanelWidth)
      widen_columns(pairs + k * kPanelWidth / 2, load_group(groups), weight.group_size, quads);
  }
}

// Steps of panels of 4-bit codes, widened on their way.
template <int Panels>
class WideningSteps {
 public:
  WideningSteps(const Weight& weight, int64_t panel, int64_t panels, const Ahead& ahead)
      : pairs_(weight.pairs(panel)),
        groups_(weight.panel_groups(panel)),
        pairs_apart_(panels > 1 ? weight.panel_bytes() : 0),
        groups_apart_(panels > 1 ? weight.num_groups() * kPanelWidth : 0),
        ahead_(ahead) {}

  void enter(int64_t g) {
    for (int n = 0; n < Panels; ++n) group_[n] = raised(load_group(groups_ + n * groups_apart_ + g * kPanelWidth));
  }
  void part(int i, Part (&w)[Panels]) const {
    for (int n = 0; n < Panels; ++n) {
      const __m512i both = load_codes(pairs_ + n * pairs_apart_);
      w[n] = widen(i == 0 ? low(both) : high(both), group_[n]);
    }
  }
  void advance() {
    for (int n = 0; n < Panels; ++n) ahead_.next(pairs_ + n * pairs_apart_);
    pairs_ += kQuadBytes;
  }

 private:
  const uint8_t *pairs_, *groups_;
  const int64_t pairs_apart_, groups_apart_;
  Ahead ahead_;
  Group group_[Panels];
};

// Panels of codes. Up to kWideRows rows are done in one pass, for which codes are widened in registers.
template <bool Scaled>
void multiply_widened(const Linear& op, const RoundedRows& x, const PanelTask& task, int8_t* scratch) {
  const Weight& weight = op.weight;
  if (op.rows <= kWideRows) {
    multiply_all_rows<Scaled>(op, x, task, weight.group_size, false, [&](auto most, int64_t panel, int64_t panels, const Ahead& ahead) {
      return WideningSteps<most.value>(weight, panel, panels, ahead);
    });
    return;
  }
  widen_panels(weight, task.first, task.last, scratch);
  const int64_t bytes = weight.depth * kPanelWidth;
  const int64_t columns = Scaled ? weight.group_size : weight.depth;
  multiply_all_rows<Scaled>(op, x, task, columns, true, [&](auto most, int64_t panel, int64_t panels, const Ahead& ahead) {
    return QuadSteps<most.value>(scratch + (panel - task.first) * bytes, panels > 1 ? bytes : 0, ahead);
  });
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

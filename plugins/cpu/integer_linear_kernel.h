// Linear with int8 or 4-bit weights for one instruction set: include after defining QWENRT_ISA.
#include "integer_products.h"
#if defined(__AMX_INT8__)
#include "integer_tiles.h"
#endif

namespace qwenrt::QWENRT_ISA {

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

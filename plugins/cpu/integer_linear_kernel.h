// Linear with int8 or 4-bit weights for one instruction set: include after defining QWENRT_ISA.
#include <cstring>

#include "integer_products.h"
#include "rounding.h"
#if defined(__AVX512VNNI__)
#include "widened_codes.h"
#endif
#if defined(__AMX_INT8__)
#include "integer_tiles.h"
#endif

namespace qwenrt::QWENRT_ISA {
namespace {

template <bool Scaled>
void multiply_panels(const Linear& op, const RoundedRows& x, const PanelTask& task, int8_t* scratch) {
  if (op.weight.type == ElementType::kInt8) return multiply_quads<Scaled>(op, x, task);
#if defined(__AVX512VNNI__)
  if (op.rows > kMostCodeRows) return multiply_widened<Scaled>(op, x, task, scratch);
#else
  static_assert(kMostCodeRows == INT64_MAX);
  static_cast<void>(scratch);
#endif
  multiply_all_codes<Scaled>(op, x, task);
}

// The sum of `count` values.
template <class Value>
int32_t sum_values(const int8_t* bytes, int64_t count) {
  int32_t sum = 0;
  for (int64_t k = 0; k < count; ++k) {
    Value value;
    std::memcpy(&value, bytes + k * static_cast<int64_t>(sizeof value), sizeof value);
    sum += value;
  }
  return sum;
}

}  // namespace

constexpr Rounding kRounding{kWords, kMostCodeRows, kRunSteps * kStep};

void integer_panels(const Linear& op, const RoundedRows& x, const PanelTask& task, int8_t* scratch) {
#if defined(__AMX_INT8__)
  if (op.rows >= kFewestTileRows) return tiled_panels(op, x, task, scratch);
#endif
  if (op.weight.group_scale != nullptr) return multiply_panels<true>(op, x, task, scratch);
  multiply_panels<false>(op, x, task, scratch);
}

void round_row(const float* x, int64_t depth, const RoundedRows& rows, int64_t row) {
  int8_t* values = rows.values + row * rows.stride;
  std::memset(values, 0, static_cast<size_t>(rows.stride));
  Ints sums{};
  rows.scale[row] = round_values(x, depth, 127, [&](int64_t k, const Ints& whole) {
    sums += whole;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (rows.words) return store_words(values + 2 * k, whole);
#endif
    store_bytes(values + k, whole);
  });
  rows.sum[row] = 0;
  for (int i = 0; i < kLanes; ++i) rows.sum[row] += sums[i];
  int32_t* group_sums = rows.group_sums + row * rows.num_groups;
  const int64_t value_bytes = rows.words ? 2 : 1;
  for (int64_t g = 0; g < rows.num_groups; ++g)
    group_sums[g] = (rows.words ? sum_values<int16_t> : sum_values<int8_t>)(values + g * rows.group_size * value_bytes, rows.group_size);
  int32_t* run_sums = rows.minus_sums + row * rows.num_runs;
  const int32_t* end = run_sums + rows.num_runs;
  for (const int8_t* group = values; run_sums < end; group += rows.group_size)
    for (int64_t k = 0; k < rows.group_size; k += rows.run_columns)
      *run_sums++ = minus_sums(group + k, rows.group_size - k < rows.run_columns ? rows.group_size - k : rows.run_columns);
}

}  // namespace qwenrt::QWENRT_ISA

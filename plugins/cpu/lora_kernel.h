// What an adapter adds to rows of a product, for one instruction set: include after defining QWENRT_ISA.
#include "lanes.h"
#include "linear.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// Adds to Rows rows of y, in the columns of Vectors vectors; each sum runs over the rank in one order.
template <int Rows, int Vectors>
void add_low_rank(const Lora& op, const float* low, const float* b, float* y) {
  Floats sums[Rows][Vectors];
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < Vectors; ++n) sums[m][n] = load(y + m * op.width + n * kLanes);
  for (int64_t r = 0; r < op.rank; ++r, b += op.width)
    for (int n = 0; n < Vectors; ++n) {
      const Floats column = load(b + n * kLanes);
      for (int m = 0; m < Rows; ++m) sums[m][n] = multiply_add(broadcast(low[m * op.rank + r]), column, sums[m][n]);
    }
  for (int m = 0; m < Rows; ++m)
    for (int n = 0; n < Vectors; ++n) store(y + m * op.width + n * kLanes, sums[m][n]);
}

}  // namespace

void lora_columns(const Lora& op, const float* low, const float* b, int64_t row, int64_t rows, int64_t first, int64_t last) {
  constexpr int kRows = 4, kVectors = 2;
  float* y = op.y + row * op.width;
  int64_t column = first;
  const auto add = [&](auto vectors) {
    in_blocks<kRows>(0, rows, [&](auto count, int64_t m) {
      add_low_rank<count.value, vectors.value>(op, low + m * op.rank, b + column, y + m * op.width + column);
    });
  };
  for (; column + kVectors * kLanes <= last; column += kVectors * kLanes) add(Count<kVectors>{});
  for (; column + kLanes <= last; column += kLanes) add(Count<1>{});
  for (; column < last; ++column)
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t r = 0; r < op.rank; ++r) y[m * op.width + column] += low[m * op.rank + r] * b[r * op.width + column];
}

}  // namespace qwenrt::QWENRT_ISA

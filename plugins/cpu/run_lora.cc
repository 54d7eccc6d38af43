#include <algorithm>
#include <string>

#include "run.h"
#include "scratch.h"

namespace qwenrt {
namespace {

constexpr int64_t kTaskElements = 1 << 14;
// Rows that are in work at a time: their products take some tens of megabytes at most.
constexpr int64_t kMostRows = 512;

// y = x W^T of rows that follow one another, W dense float32.
void multiply(const float* x, const float* weight, float* y, int64_t rows, int64_t depth, int64_t width, const Parallel& parallel) {
  const Weight whole{weight, nullptr, nullptr, width, depth, 0, ElementType::kFloat32};
  run_linear({x, whole, nullptr, y, rows, depth}, parallel);
}

// The same for rows [first, first + rows) of one adapter.
void add_adapter(const Lora& op, int64_t adapter, int64_t first, int64_t rows, const Parallel& parallel) {
  float* low = thread_scratch<Lora, float>(rows * (op.rank + op.width));
  float* product = low + rows * op.rank;
  multiply(op.x + first * op.depth, op.a + adapter * op.rank * op.depth, low, rows, op.depth, op.rank, parallel);
  multiply(low, op.b + adapter * op.width * op.rank, product, rows, op.rank, op.width, parallel);
  float* y = op.y + first * op.width;
  const int64_t elements = rows * op.width;
  parallel.run((elements + kTaskElements - 1) / kTaskElements, [&](int64_t task) {
    const int64_t last = std::min((task + 1) * kTaskElements, elements);
    for (int64_t i = task * kTaskElements; i < last; ++i) y[i] += product[i];
  });
}

}  // namespace

void run_lora(const Lora& op, const Parallel& parallel) {
  for (int64_t row = 0; row < op.rows; ++row)
    if (op.adapters[row] < -1 || op.adapters[row] >= op.count)
      throw InvalidArgument("adapters[" + std::to_string(row) + "] is " + std::to_string(op.adapters[row]) + ", but lora_a has " +
                            std::to_string(op.count));
  if (op.rank == 0 || op.width == 0) return;
  for (int64_t row = 0, end; row < op.rows; row = end) {
    for (end = row + 1; end < op.rows && end - row < kMostRows && op.adapters[end] == op.adapters[row];) ++end;
    if (op.adapters[row] >= 0) add_adapter(op, op.adapters[row], row, end - row, parallel);
  }
}

}  // namespace qwenrt

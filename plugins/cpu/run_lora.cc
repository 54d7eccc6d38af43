#include <algorithm>
#include <string>
#include <vector>

#include "isa.h"
#include "run.h"
#include "scratch.h"

namespace qwenrt {
namespace {

constexpr int64_t kTaskColumns = 256;
// Rows that are in work at a time, so that what lies between A and B takes some megabytes at most.
constexpr int64_t kMostRows = 512;
// So few products are done before another thread would have begun.
constexpr int64_t kSerialProducts = int64_t{1} << 18;

// Rows that follow one another and have the same adapter.
struct Run {
  int64_t adapter, first, rows;
};

void add_runs(const Lora& op, const std::vector<Run>& runs, const Parallel& parallel) {
  const Run& last_run = runs.back();
  const int64_t begin = runs.front().first, rows = last_run.first + last_run.rows - begin;
  float* low = thread_scratch<Lora, float>(rows * op.rank);
  const Parallel serial{[](int64_t tasks, const std::function<void(int64_t)>& work) {
                          for (int64_t task = 0; task < tasks; ++task) work(task);
                        },
                        1};
  for (const Run& run : runs) {
    const Weight a{op.a + run.adapter * op.rank * op.depth, nullptr, nullptr, nullptr, nullptr, op.rank, op.depth, 0, ElementType::kFloat32};
    const Linear product{op.x + run.first * op.depth, a, nullptr, low + (run.first - begin) * op.rank, run.rows, op.depth};
    run_linear(product, run.rows * op.rank * op.depth <= kSerialProducts ? serial : parallel);
  }
  const Isa& kernels = isa();
  parallel.run((op.width + kTaskColumns - 1) / kTaskColumns, [&](int64_t task) {
    const int64_t first = task * kTaskColumns, last = std::min(first + kTaskColumns, op.width);
    for (const Run& run : runs)
      kernels.lora_columns(op, low + (run.first - begin) * op.rank, op.b + run.adapter * op.rank * op.width, run.first, run.rows, first, last);
  });
}

}  // namespace

void run_lora(const Lora& op, const Parallel& parallel) {
  for (int64_t row = 0; row < op.rows; ++row)
    if (op.adapters[row] < -1 || op.adapters[row] >= op.count)
      throw InvalidArgument("adapters[" + std::to_string(row) + "] is " + std::to_string(op.adapters[row]) + ", but lora_a has " +
                            std::to_string(op.count));
  if (op.rank == 0 || op.width == 0) return;
  for (int64_t begin = 0; begin < op.rows; begin += kMostRows) {
    const int64_t stop = std::min(begin + kMostRows, op.rows);
    std::vector<Run> runs;
    for (int64_t row = begin, end; row < stop; row = end) {
      for (end = row + 1; end < stop && op.adapters[end] == op.adapters[row];) ++end;
      if (op.adapters[row] >= 0) runs.push_back({op.adapters[row], row, end - row});
    }
    if (!runs.empty()) add_runs(op, runs, parallel);
  }
}

}  // namespace qwenrt

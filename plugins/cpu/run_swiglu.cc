#include <algorithm>

#include "isa.h"
#include "run.h"

namespace qwenrt {

void run_swiglu(const SwiGlu& op, const Parallel& parallel) {
  // Handing less than this to another thread costs more than doing it.
  constexpr int64_t kTaskElements = 16384;
  const Isa& kernels = isa();
  const int64_t task_rows = std::max(int64_t{1}, kTaskElements / std::max(int64_t{1}, op.inner));
  parallel.run((op.rows + task_rows - 1) / task_rows, [&](int64_t task) {
    const int64_t last = std::min((task + 1) * task_rows, op.rows);
    for (int64_t row = task * task_rows; row < last; ++row) {
      const float* gate = op.gate_up + row * 2 * op.inner;
      kernels.swiglu(gate, gate + op.inner, op.y + row * op.inner, op.inner);
    }
  });
}

}  // namespace qwenrt

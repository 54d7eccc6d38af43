#include <algorithm>
#include <string>

#include "isa.h"
#include "run.h"

namespace qwenrt {
namespace {

// Wide enough that handing out a task is cheap beside it, narrow enough that every thread of a large machine gets some.
constexpr int64_t kTaskColumns = 32;

}  // namespace

void run_linear(const Linear& op, const Parallel& parallel) {
  if (op.weight_type != ElementType::kFloat32 && op.weight_type != ElementType::kFloat16 &&
      op.weight_type != ElementType::kBFloat16)
    throw InvalidArgument("weight has element type " + std::to_string(static_cast<int32_t>(op.weight_type)) +
                          "; it must be float32, float16 or bfloat16");
  if (op.rows == 0 || op.width == 0) return;
  const Isa& kernels = isa();
  parallel.run((op.width + kTaskColumns - 1) / kTaskColumns, [&](int64_t task) {
    const int64_t first = task * kTaskColumns;
    kernels.linear_columns(op, first, std::min(first + kTaskColumns, op.width));
  });
}

}  // namespace qwenrt

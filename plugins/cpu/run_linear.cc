#include <algorithm>
#include <string>

#include "isa.h"
#include "run.h"
#include "scratch.h"

namespace qwenrt {
namespace {

// Wide enough that handing out a task is cheap beside it, narrow enough that every thread of a large machine gets some.
constexpr int64_t kTaskColumns = 32;
constexpr int64_t kMostTaskPanels = 16;  // lie in a second-level cache
constexpr int64_t kSerialRows = 4;  // handing so few rows to other threads costs more than rounding them

RoundedRows round_rows(const Linear& op, const Isa& kernels, const Parallel& parallel) {
  const int64_t rows = (op.rows + kRowsUnit - 1) / kRowsUnit * kRowsUnit;
  RoundedRows x(op.weight, kernels.rounding, op.rows);
  x.place(thread_scratch<RoundedRows>(x.bytes(rows)), rows);
  const auto round = [&](int64_t row) { kernels.round_row(op.x + row * op.depth, op.depth, x, row); };
  if (op.rows <= kSerialRows) {
    for (int64_t row = 0; row < op.rows; ++row) round(row);
  } else {
    parallel.run(op.rows, round);
  }
  return x;
}

void run_integer_linear(const Linear& op, const Isa& kernels, const Parallel& parallel) {
  const RoundedRows x = round_rows(op, kernels, parallel);
  // An even number, since some kernels take panels two by two; and a few tasks for every thread.
  const int64_t panels = op.weight.panels(), share = panels / (16 * parallel.threads) / 2 * 2;
  const int64_t task_panels = std::clamp(share, int64_t{2}, kMostTaskPanels);
  run_with_scratch<int8_t>(parallel, (panels + task_panels - 1) / task_panels, integer_scratch(kernels, op, task_panels), [&](int64_t task, int8_t* scratch) {
    const auto start = [&](int64_t i) { return std::min(i * task_panels, panels); };
    const int64_t next = task + parallel.threads;
    kernels.integer_panels(op, x, {start(task), start(task + 1), start(next), start(next + 1)}, scratch);
  });
}

// Channels of a task. For few rows it is memory that counts, which is read best in few streams; for many, x, which lies in a third-level
// cache and is read once a task.
int64_t tile_channels(const Linear& op, const Parallel& parallel) {
  constexpr int64_t kFewRows = 64, kFewest = 64, kMost = 512;
  if (op.rows <= kFewRows) return kTaskColumns;
  return std::clamp(op.weight.width / (2 * parallel.threads) / kFewest * kFewest, kFewest, kMost);
}

void run_tiled_linear(const Linear& op, const Isa& kernels, const Parallel& parallel) {
  SplitRows x(op.rows, op.depth);
  const int64_t groups = x.groups(op.rows), width = op.weight.width, channels = tile_channels(op, parallel);
  x.words = thread_scratch<SplitRows, uint32_t>(x.count(groups));
  parallel.run(groups, [&](int64_t group) { kernels.split_rows(op, x, group); });
  run_with_scratch<float>(parallel, (width + channels - 1) / channels, tile_scratch(op.rows, channels), [&](int64_t task, float* scratch) {
    const int64_t first = task * channels;
    kernels.tiled_columns(op, x, first, std::min(first + channels, width), scratch);
  });
}

// Some hundred rows of x at a time: their parts and sums stay in caches.
void run_tiled_linear_in_blocks(Linear op, const Isa& kernels, const Parallel& parallel) {
  constexpr int64_t kMostRows = 512;
  for (int64_t left = op.rows; left > 0; left -= op.rows, op.x += op.rows * op.depth, op.y += op.rows * op.weight.width) {
    op.rows = std::min(left, kMostRows);
    run_tiled_linear(op, kernels, parallel);
  }
}

}  // namespace

void check_weight(const Weight& weight, int64_t depth, bool floats) {
  const bool is_float = weight.type == ElementType::kFloat32 || weight.type == ElementType::kFloat16 || weight.type == ElementType::kBFloat16;
  if (!weight.is_integer() && !(floats && is_float))
    throw InvalidArgument("weight has element type " + std::to_string(static_cast<int32_t>(weight.type)) + "; it must be " +
                          (floats ? "float32, float16, bfloat16, " : "") + "int8 or uint8");
  if (!weight.is_integer()) return;
  if (weight.scale == nullptr) throw InvalidArgument("scale is missing; int8 and uint8 weights need it");
  if (weight.depth > kMaxIntegerDepth || weight.depth % kDepthUnit != 0)
    throw InvalidArgument("weight has " + std::to_string(weight.depth) + " columns; with integers it must be a multiple of " +
                          std::to_string(kDepthUnit) + ", at most " + std::to_string(kMaxIntegerDepth));
  if (depth < 0 || depth > weight.depth)
    throw InvalidArgument("the depth is " + std::to_string(depth) + ", but weight has " + std::to_string(weight.depth) + " columns");
  const bool scaled = weight.group_scale != nullptr;
  if (weight.group_offset != nullptr && !scaled) throw InvalidArgument("group_scale is missing; group_offset needs it");
  if (weight.type != ElementType::kUint8 && !scaled) return;
  if (weight.type == ElementType::kUint8 && weight.groups == nullptr) throw InvalidArgument("groups is missing; uint8 weights need it");
  constexpr int64_t kUnit = 2 * kQuad;
  if (weight.group_size < kUnit || weight.group_size % kUnit != 0 || weight.depth % weight.group_size != 0)
    throw InvalidArgument("groups are of " + std::to_string(weight.group_size) + " columns; that must be a multiple of " +
                          std::to_string(kUnit) + " and divide weight's " + std::to_string(weight.depth));
  if (scaled && weight.group_size % kDepthUnit != 0 && kDepthUnit % weight.group_size != 0)
    throw InvalidArgument("groups with scales are of " + std::to_string(weight.group_size) + " columns; that must be a divisor or a multiple of " +
                          std::to_string(kDepthUnit));
}

void run_linear(const Linear& op, const Parallel& parallel) {
  check_weight(op.weight, op.depth, true);
  if (op.rows == 0 || op.weight.width == 0) return;
  const Isa& kernels = isa();
  if (op.weight.is_integer()) return run_integer_linear(op, kernels, parallel);
  const int64_t width = op.weight.width;
  if (fits_tiles(kernels, op.weight.type, op.depth)) return run_tiled_linear_in_blocks(op, kernels, parallel);
  parallel.run((width + kTaskColumns - 1) / kTaskColumns, [&](int64_t task) {
    const int64_t first = task * kTaskColumns;
    kernels.linear_columns(op, first, std::min(first + kTaskColumns, width));
  });
}

void run_embedding(const Embedding& op) {
  const Weight& weight = op.weight;
  check_weight(weight, op.depth, false);
  for (int64_t row = 0; row < op.rows; ++row)
    if (op.ids[row] < 0 || op.ids[row] >= weight.width)
      throw InvalidArgument("ids[" + std::to_string(row) + "] is " + std::to_string(op.ids[row]) + ", but weight has " +
                            std::to_string(weight.width) + " rows");
  for (int64_t row = 0; row < op.rows; ++row) {
    const int64_t panel = op.ids[row] / kPanelWidth, lane = op.ids[row] % kPanelWidth;
    const float scale = weight.scale[op.ids[row]];
    float* y = op.y + row * op.depth;
    for (int64_t k = 0; k < op.depth; ++k) {
      const int64_t group = weight.num_groups() > 0 ? weight.panel_start(panel) + k / weight.group_size * kPanelWidth + lane : 0;
      int8_t value;
      if (weight.type == ElementType::kInt8) {
        value = weight.panel(panel)[k / kQuad * kQuadBytes + lane * kQuad + k % kQuad];
      } else {
        const uint8_t byte = weight.groups[group];
        const uint8_t pair = weight.pairs(panel)[k / (2 * kQuad) * kQuadBytes + lane * kQuad + k % kQuad];
        const int code = k % (2 * kQuad) < kQuad ? pair & 15 : pair >> 4;
        value = static_cast<int8_t>((code - (byte >> 4)) * (byte & 15));
      }
      float product = static_cast<float>(value);
      if (weight.group_scale != nullptr) product *= weight.group_scale[group];
      if (weight.group_offset != nullptr) product += weight.group_offset[group];
      y[k] = product * scale;
    }
  }
}

}  // namespace qwenrt

// linear_task for one instruction set: include after defining QWENRT_ISA.
#include <algorithm>

#include "lanes.h"
#include "linear.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// A tile's sums and operands fill the vector registers, 16 or with AVX-512 32: 4 x 3 or 4 x 6 sums, as many vectors of x as rows, 1 of the
// weights.
constexpr int kTileWidth = 4;
constexpr int kTileRows = kLanes == 16 ? 6 : 3;
// Four weight rows of this depth take half of a 32 KiB first-level cache, the x of one batch half of a 512 KiB second-level cache.
constexpr int64_t kDepthStep = 1024;
constexpr int64_t kBatchRows = 66;  // whole tiles

// Adds the products of Width weight rows and Rows rows of x over `depth` columns, a multiple of kLanes, to `sums`. Meanwhile memory is
// called for the same columns of `num_ahead` weight rows from `ahead` on.
template <int Width, int Rows, class Weight>
void multiply_tile(const Weight* weight, const float* x, int64_t stride, int64_t depth, bool first, const Weight* ahead, int num_ahead,
                   Floats (*sums)[kTileWidth]) {
  Floats local[Rows][Width];
  // By force: GCC 12 does not unroll so much by itself, and keeps the sums in memory then.
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < Width; ++n) local[m][n] = first ? zero() : sums[m][n];
  for (int64_t k = 0; k < depth; k += kLanes) {
    for (int n = 0; n < num_ahead; ++n) __builtin_prefetch(ahead + n * stride + k, 0, 2);
    Floats xs[Rows];
#pragma GCC unroll 8
    for (int m = 0; m < Rows; ++m) xs[m] = load(x + m * stride + k);
#pragma GCC unroll 4
    for (int n = 0; n < Width; ++n) {
      const Floats w = load(weight + n * stride + k);
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) local[m][n] = multiply_add(xs[m], w, local[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < Width; ++n) sums[m][n] = local[m][n];
}

// y for `rows` rows of x, at most kBatchRows, and the Width weight rows from `column` on. Sums go through memory between depth
// steps, in full vectors, so that the order of additions is the same however the depth is cut. The first tiles share out
// the next Width weight rows among them and call for these, so that memory is at work while products are computed.
template <int Width, class Weight>
void multiply_columns(const Linear& op, const Weight* weight, int64_t row, int64_t rows, int64_t column) {
  Floats sums[kBatchRows][kTileWidth];
  const int64_t whole = op.depth / kLanes * kLanes;
  const Weight* w = weight + column * op.depth;
  const float* x = op.x + row * op.depth;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const int share = static_cast<int>((Width + tiles - 1) / tiles);
  for (int64_t k = 0; k < whole || k == 0; k += kDepthStep) {
    const int64_t depth = std::min(kDepthStep, whole - k);
    int called = 0;
    in_blocks<kTileRows>(0, rows, [&](auto block, int64_t m) {
      const int num_ahead = std::min(share, Width - called);
      const Weight* ahead = w + (Width + called) * op.depth + k;
      multiply_tile<Width, block.value>(w + k, x + m * op.depth + k, op.depth, depth, k == 0, ahead, num_ahead, sums + m);
      called += num_ahead;
    });
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int n = 0; n < Width; ++n) {
      float y = sum(sums[m][n]);
      for (int64_t k = whole; k < op.depth; ++k) y += x[m * op.depth + k] * to_float(w[n * op.depth + k]);
      if (op.bias != nullptr) y += op.bias[column + n];
      op.y[(row + m) * op.weight.width + column + n] = y;
    }
}

template <class Weight>
void multiply(const Linear& op, const Weight* weight, int64_t first, int64_t last) {
  for (int64_t row = 0; row < op.rows; row += kBatchRows) {
    const int64_t rows = std::min(kBatchRows, op.rows - row);
    int64_t column = first;
    for (; column + kTileWidth <= last; column += kTileWidth)
      multiply_columns<kTileWidth>(op, weight, row, rows, column);
    for (; column < last; ++column) multiply_columns<1>(op, weight, row, rows, column);
  }
}

}  // namespace

void linear_columns(const Linear& op, int64_t first, int64_t last) {
  switch (op.weight.type) {
    case ElementType::kFloat32:
      return multiply(op, static_cast<const float*>(op.weight.data), first, last);
    case ElementType::kFloat16:
      return multiply(op, static_cast<const Float16*>(op.weight.data), first, last);
    case ElementType::kBFloat16:
      return multiply(op, static_cast<const BFloat16*>(op.weight.data), first, last);
    case ElementType::kInt8:
    case ElementType::kUint8:
      return;  // integer_panels
  }
}

}  // namespace qwenrt::QWENRT_ISA

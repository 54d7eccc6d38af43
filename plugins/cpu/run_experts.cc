#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isa.h"
#include "run.h"
#include "scratch.h"

namespace qwenrt {
namespace {

constexpr int64_t kTaskColumns = 32;  // as in run_linear.cc
constexpr int64_t kTaskRows = 16;
// Rows that are in work at a time: enough that each expert's weights are read once or twice for a long prompt, few enough that the
// rows' intermediate values take some tens of megabytes.
constexpr int64_t kBatchRows = 1024;

struct Choice {
  int32_t expert;
  float score;
};

// The top_k experts of one token, largest logit first and the lower index first among equals, with their shares of the softmax. A NaN
// among the logits makes every score NaN.
void choose(const MixtureOfExperts& op, int64_t token, Choice* choices) {
  const float* logits = op.router + token * op.num_experts;
  const auto order = [&](int64_t e) { return std::isnan(logits[e]) ? -std::numeric_limits<float>::infinity() : logits[e]; };
  int64_t chosen = 0;
  for (int64_t e = 0; e < op.num_experts; ++e) {
    if (chosen == op.top_k && !(order(e) > order(choices[chosen - 1].expert))) continue;
    int64_t place = chosen < op.top_k ? chosen++ : chosen - 1;
    for (; place > 0 && order(e) > order(choices[place - 1].expert); --place) choices[place] = choices[place - 1];
    choices[place].expert = static_cast<int32_t>(e);
  }
  const float largest = logits[choices[0].expert];
  float all = 0, kept = 0;
  for (int64_t e = 0; e < op.num_experts; ++e) all += std::exp(logits[e] - largest);
  for (int64_t k = 0; k < op.top_k; ++k) kept += choices[k].score = std::exp(logits[choices[k].expert] - largest) / all;
  if (op.norm_topk_prob)
    for (int64_t k = 0; k < op.top_k; ++k) choices[k].score /= kept;
}

// Tokens by expert: those of expert e are rows start[e] to start[e + 1], in the order of the tokens.
struct Routing {
  std::vector<int64_t> start, token;
  std::vector<float> score;

  Routing(const MixtureOfExperts& op, const Parallel& parallel)
      : start(static_cast<size_t>(op.num_experts) + 1), token(static_cast<size_t>(op.tokens * op.top_k)), score(token.size()) {
    std::vector<Choice> choices(token.size());
    parallel.run((op.tokens + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
      const int64_t last = std::min((task + 1) * kTaskRows, op.tokens);
      for (int64_t t = task * kTaskRows; t < last; ++t) choose(op, t, choices.data() + t * op.top_k);
    });
    for (const Choice& choice : choices) ++start[static_cast<size_t>(choice.expert) + 1];
    for (size_t e = 1; e < start.size(); ++e) start[e] += start[e - 1];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (size_t i = 0; i < choices.size(); ++i) {
      const size_t row = static_cast<size_t>(next[static_cast<size_t>(choices[i].expert)]++);
      token[row] = static_cast<int64_t>(i) / op.top_k;
      score[row] = choices[i].score;
    }
  }

  int64_t rows(int64_t expert) const { return start[static_cast<size_t>(expert) + 1] - start[static_cast<size_t>(expert)]; }
};

// Some experts that have rows, and the memory that their rows need. `base` is the row of the first.
struct Batch {
  std::vector<int64_t> experts;
  int64_t base = 0, rows = 0;
};

std::vector<Batch> make_batches(const MixtureOfExperts& op, const Routing& routing) {
  std::vector<Batch> batches;
  for (int64_t e = 0; e < op.num_experts; ++e) {
    const int64_t rows = routing.rows(e);
    if (rows == 0) continue;
    if (batches.empty() || batches.back().rows + rows > kBatchRows)
      batches.push_back({{}, routing.start[static_cast<size_t>(e)], 0});
    batches.back().experts.push_back(e);
    batches.back().rows += rows;
  }
  return batches;
}

// One of the two products of an expert: its weights, and the rows that it takes, as floats and in the form that its kernel needs.
struct Product {
  const Weight& weight;
  int64_t depth;
  float* x;
  bool tiled;
  RoundedRows rounded;
  uint32_t* words;  // of rows in parts, twice as many as there are rows, for every expert fills up its last group

};

// The memory of a batch's rows, and their way through the experts.
class Experts {
 public:
  Experts(const MixtureOfExperts& op, const Routing& routing, int64_t rows, const Parallel& parallel)
      : op_(op), routing_(routing), parallel_(parallel), kernels_(isa()), integers_(op.gate_up.is_integer()) {
    const int64_t x_floats = rows * op.hidden;
    floats_.reset(new float[static_cast<size_t>(x_floats + rows * 3 * op.inner)]);
    float* x = floats_.get();
    gate_up_ = x + x_floats;
    up_.x = x, down_.x = gate_up_ + rows * 2 * op.inner;
    if (integers_) {
      const int64_t most = rows + kRowsUnit;
      // An expert may have a single row.
      up_.rounded = RoundedRows(op.gate_up, kernels_.rounding, 1), down_.rounded = RoundedRows(op.down, kernels_.rounding, 1);
      const int64_t x_bytes = (up_.rounded.bytes(most) + 63) / 64 * 64;
      bytes_ = lines(x_bytes + down_.rounded.bytes(most));
      up_.rounded.place(bytes_[0].bytes, most), down_.rounded.place(bytes_[0].bytes + x_bytes, most);
    }
    for (Product* product : {&up_, &down_}) product->tiled = fits_tiles(kernels_, product->weight.type, product->depth);
    const auto words = [&](const Product& product) { return product.tiled ? SplitRows(1, product.depth).count(2 * rows) : 0; };
    if (!up_.tiled && !down_.tiled) return;
    bytes_ = lines((words(up_) + words(down_)) * static_cast<int64_t>(sizeof(uint32_t)));
    up_.words = reinterpret_cast<uint32_t*>(bytes_.get());
    down_.words = up_.words + words(up_);
  }

  void run(const Batch& batch) {
    gather(batch);
    if (up_.tiled) split(batch, up_);
    up(batch);
    if (integers_) round_inner(batch);
    if (down_.tiled) split(batch, down_);
    down(batch);
  }

 private:
  static std::unique_ptr<CacheLine[]> lines(int64_t bytes) {
    return std::unique_ptr<CacheLine[]>(new CacheLine[(static_cast<size_t>(bytes) + sizeof(CacheLine) - 1) / sizeof(CacheLine)]);
  }

  // The product of an expert's rows with its part of the weights; `base` is where the batch begins.
  Linear linear(int64_t base, int64_t expert, const Product& product, float* y) const {
    const int64_t row = row_of(base, expert), width = product.weight.width / op_.num_experts;
    return {product.x + row * product.depth, product.weight.part(expert * width, width), nullptr, y + row * width, routing_.rows(expert),
            product.depth};
  }

  // An expert's rows in parts.
  SplitRows parts(int64_t base, int64_t expert, const Product& product) const {
    SplitRows x(routing_.rows(expert), product.depth);
    x.words = product.words + SplitRows(1, product.depth).count(2 * row_of(base, expert));
    return x;
  }

  int64_t row_of(int64_t base, int64_t expert) const { return routing_.start[static_cast<size_t>(expert)] - base; }

  // y of columns [first, last), of which with integers first is the start of a panel.
  void multiply(int64_t base, int64_t expert, const Product& product, const Linear& op, int64_t first, int64_t last, int8_t* scratch) const {
    if (integers_) {
      kernels_.integer_panels(op, product.rounded.from(row_of(base, expert)), {first / kPanelWidth, (last + kPanelWidth - 1) / kPanelWidth}, scratch);
    } else if (product.tiled) {
      kernels_.tiled_columns(op, parts(base, expert, product), first, last, reinterpret_cast<float*>(scratch));
    } else {
      kernels_.linear_columns(op, first, last);
    }
  }

  int64_t most_rows(const Batch& batch) const {
    int64_t most = 0;
    for (const int64_t expert : batch.experts) most = std::max(most, routing_.rows(expert));
    return most;
  }

  int64_t task_columns(const Batch& batch, const Product& product) const {
    return product.tiled && most_rows(batch) > kGroupRows ? 2 * kTaskColumns : kTaskColumns;
  }

  int64_t scratch_bytes(const Batch& batch, const Product& product) const {
    if (product.tiled) return tile_scratch(most_rows(batch), task_columns(batch, product)) * static_cast<int64_t>(sizeof(float));
    const Linear op{nullptr, product.weight, nullptr, nullptr, most_rows(batch), 0};
    return integers_ ? integer_scratch(kernels_, op, kTaskColumns / kPanelWidth) : 0;
  }

  template <class Work>
  void for_rows(int64_t rows, const Work& work) const {
    parallel_.run((rows + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
      for (int64_t row = task * kTaskRows; row < std::min((task + 1) * kTaskRows, rows); ++row) work(row);
    });
  }

  void gather(const Batch& batch) {
    for_rows(batch.rows, [&](int64_t row) {
      const float* x = op_.x + routing_.token[static_cast<size_t>(batch.base + row)] * op_.hidden;
      if (integers_) {
        kernels_.round_row(x, op_.hidden, up_.rounded, row);
      } else {
        std::copy_n(x, op_.hidden, up_.x + row * op_.hidden);
      }
    });
  }

  void split(const Batch& batch, const Product& product) {
    std::vector<std::pair<int64_t, int64_t>> groups;  // expert, group
    for (const int64_t expert : batch.experts)
      for (int64_t group = 0; group * kGroupRows < routing_.rows(expert); ++group) groups.emplace_back(expert, group);
    parallel_.run(static_cast<int64_t>(groups.size()), [&](int64_t task) {
      const auto [expert, group] = groups[static_cast<size_t>(task)];
      kernels_.split_rows(linear(batch.base, expert, product, nullptr), parts(batch.base, expert, product), group);
    });
  }

  void up(const Batch& batch) {
    const int64_t columns = task_columns(batch, up_), parts = (op_.inner + columns - 1) / columns;
    const int64_t tasks = static_cast<int64_t>(batch.experts.size()) * parts;
    run_with_scratch<int8_t>(parallel_, tasks, scratch_bytes(batch, up_), [&](int64_t task, int8_t* scratch) {
      const int64_t expert = batch.experts[static_cast<size_t>(task / parts)], row = row_of(batch.base, expert);
      const int64_t first = task % parts * columns, last = std::min(first + columns, op_.inner);
      const Linear op = linear(batch.base, expert, up_, gate_up_);
      multiply(batch.base, expert, up_, op, first, last, scratch);
      multiply(batch.base, expert, up_, op, op_.inner + first, op_.inner + last, scratch);
      for (int64_t i = 0; i < op.rows; ++i) {
        const float* gate = op.y + i * op.weight.width + first;
        kernels_.swiglu(gate, gate + op_.inner, down_.x + (row + i) * op_.inner + first, last - first);
      }
    });
  }

  void round_inner(const Batch& batch) {
    for_rows(batch.rows, [&](int64_t row) { kernels_.round_row(down_.x + row * op_.inner, op_.inner, down_.rounded, row); });
  }

  // A task adds the columns of all experts, one after the other, so that each token's sum is in the order of its experts. The products
  // go where x was.
  void down(const Batch& batch) {
    const int64_t columns = task_columns(batch, down_), tasks = (op_.hidden + columns - 1) / columns;
    run_with_scratch<int8_t>(parallel_, tasks, scratch_bytes(batch, down_), [&](int64_t task, int8_t* scratch) {
      const int64_t first = task * columns, last = std::min(first + columns, op_.hidden);
      for (const int64_t expert : batch.experts) {
        const Linear op = linear(batch.base, expert, down_, up_.x);
        multiply(batch.base, expert, down_, op, first, last, scratch);
        const int64_t start = routing_.start[static_cast<size_t>(expert)];
        for (int64_t row = 0; row < op.rows; ++row) {
          const float score = routing_.score[static_cast<size_t>(start + row)];
          float* y = op_.y + routing_.token[static_cast<size_t>(start + row)] * op_.hidden;
          for (int64_t i = first; i < last; ++i) y[i] += score * op.y[row * op_.hidden + i];
        }
      }
    });
  }

  const MixtureOfExperts& op_;
  const Routing& routing_;
  const Parallel& parallel_;
  const Isa& kernels_;
  const bool integers_;
  std::unique_ptr<float[]> floats_;
  std::unique_ptr<CacheLine[]> bytes_;
  float* gate_up_;
  Product up_{op_.gate_up, op_.hidden, nullptr, false, {}, nullptr};
  Product down_{op_.down, op_.inner, nullptr, false, {}, nullptr};
};

void check(const MixtureOfExperts& op) {
  if (op.gate_up.type != op.down.type)
    throw InvalidArgument("gate_up has element type " + std::to_string(static_cast<int32_t>(op.gate_up.type)) + " and down " +
                          std::to_string(static_cast<int32_t>(op.down.type)) + "; they must have the same");
  check_weight(op.gate_up, op.hidden, true);
  check_weight(op.down, op.inner, true);
  if (op.gate_up.is_integer() && (op.hidden % kPanelWidth != 0 || op.inner % kPanelWidth != 0))
    throw InvalidArgument("experts of integers are " + std::to_string(op.inner) + " by " + std::to_string(op.hidden) +
                          "; both must be multiples of " + std::to_string(kPanelWidth));
  if (op.top_k < 1 || op.top_k > op.num_experts)
    throw InvalidArgument("top_k is " + std::to_string(op.top_k) + "; it must be between 1 and the " +
                          std::to_string(op.num_experts) + " experts of router_logits");
}

}  // namespace

void run_mixture_of_experts(const MixtureOfExperts& op, const Parallel& parallel) {
  check(op);
  std::fill_n(op.y, op.tokens * op.hidden, 0.0f);
  if (op.tokens == 0 || op.hidden == 0) return;
  const Routing routing(op, parallel);
  const std::vector<Batch> batches = make_batches(op, routing);
  int64_t rows = 0;
  for (const Batch& batch : batches) rows = std::max(rows, batch.rows);
  Experts experts(op, routing, rows, parallel);
  for (const Batch& batch : batches) experts.run(batch);
}

}  // namespace qwenrt

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "isa.h"
#include "run.h"
#include "scratch.h"

namespace qwenrt {
namespace {

constexpr int64_t kSerialLogits = 1 << 16;  // so few are done before another thread is awake
constexpr int64_t kSortedWeights = 512;     // so few are sorted outright
constexpr int64_t kSumBlock = 512;

// The tokens of a row that may still be drawn: ascending ids with their logits, which become weights.
struct Candidates {
  int32_t* ids;
  float* values;
  int64_t count;

  template <class Keep>
  void filter(const Keep& keep) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {  // no branch, since nothing could foretell it
      const float value = values[i];
      ids[kept] = ids[i], values[kept] = value;
      kept += keep(value);
    }
    count = kept;
  }

  // What is above `cut`, and of what equals it the first `ties`.
  void keep_above(float cut, int64_t ties) {
    filter([&](float value) { return value > cut || (value == cut && ties-- > 0); });
  }
};

// What a row needs beside its logits.
struct Scratch {
  float* values;   // [vocab]
  float* copy;     // [vocab]
  int32_t* ids;    // [vocab]
  float* peaks;    // [blocks of peak_block]
  double* sums;    // [blocks of kSumBlock]
  double* masses;  // [kBuckets]
  int64_t* counts; // [kBuckets]
};

constexpr int kBucketBits = 12;
constexpr int64_t kBuckets = int64_t{1} << kBucketBits;

// So many logits have their peak taken together: blocks whose peak is too low are passed over.
int64_t peak_block(int64_t vocab) { return std::clamp(vocab / 1024 / kPeakUnit, int64_t{1}, int64_t{8}) * kPeakUnit; }

int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

double sum_of(const float* values, int64_t count) {
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += values[i + lane];
  for (; i < count; ++i) lanes[i % 8] += values[i];
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

float kth_largest(const float* values, int64_t count, int64_t k, float* copy) {
  std::copy(values, values + count, copy);
  std::nth_element(copy, copy + k - 1, copy + count, std::greater<float>());
  return copy[k - 1];
}

// The smallest weight in the fewest largest weights that sum to `mass`, and how many of that weight are among them.
struct NucleusCut {
  float weight;
  int64_t ties;
};

NucleusCut sorted_nucleus_cut(const Candidates& from, double mass, float* copy) {
  std::copy(from.values, from.values + from.count, copy);
  std::sort(copy, copy + from.count, std::greater<float>());
  double sum = 0;
  int64_t last = 0;
  for (; last + 1 < from.count; ++last)
    if ((sum += copy[last]) >= mass) break;
  return {copy[last], last + 1 - (std::find(copy, copy + last, copy[last]) - copy)};
}

// The same in linear time: by the first bits of a weight's pattern, which are in the order of the weights, then by the next.
NucleusCut radix_nucleus_cut(const Candidates& from, double mass, const Scratch& scratch) {
  uint32_t prefix = 0;
  int64_t count = 0;
  for (int shift = 32 - kBucketBits, above = 32; above > 0; above = shift, shift = std::max(shift - kBucketBits, 0)) {
    std::fill(scratch.masses, scratch.masses + kBuckets, 0.0);
    std::fill(scratch.counts, scratch.counts + kBuckets, 0);
    const uint32_t mask = (uint32_t{1} << (above - shift)) - 1;
    for (int64_t i = 0; i < from.count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, from.values + i, sizeof bits);
      if (above < 32 && bits >> above != prefix) continue;
      scratch.masses[bits >> shift & mask] += from.values[i];
      ++scratch.counts[bits >> shift & mask];
    }
    uint32_t lowest = 0, bucket = mask;
    while (scratch.counts[lowest] == 0) ++lowest;
    for (; bucket != lowest && scratch.masses[bucket] < mass; --bucket) mass -= scratch.masses[bucket];
    prefix = above < 32 ? prefix << (above - shift) | bucket : bucket;
    count = scratch.counts[bucket];
  }
  NucleusCut cut{0, count};
  std::memcpy(&cut.weight, &prefix, sizeof prefix);
  if (cut.weight > 0) cut.ties = std::clamp(static_cast<int64_t>(std::ceil(mass / cut.weight)), int64_t{1}, count);
  return cut;
}

// Leaves the fewest largest weights that sum to at least top_p of all; of equal ones the first.
void keep_nucleus(Candidates& from, double top_p, const Scratch& scratch) {
  const double total = sum_of(from.values, from.count);
  // What is lighter sums to less than 1 - top_p of all, so the nucleus lies in the rest.
  const float light = static_cast<float>((1 - top_p) * total / static_cast<double>(from.count));
  from.filter([&](float weight) { return weight >= light; });
  const NucleusCut cut = from.count <= kSortedWeights ? sorted_nucleus_cut(from, top_p * total, scratch.copy)
                                                      : radix_nucleus_cut(from, top_p * total, scratch);
  from.keep_above(cut.weight, cut.ties);
}

// The first index whose running sum exceeds `target`, which loses what came before; never one that adds nothing.
template <class Value>
int64_t first_above(const Value* values, int64_t count, double& target) {
  double sum = 0, before = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] <= 0) continue;
    last = i, before = sum;
    if ((sum += values[i]) > target) break;
  }
  target -= before;
  return last;
}

// An index drawn with probability proportional to `weights` by inverting their sum at `uniform`.
int64_t draw(const float* weights, int64_t count, double uniform, double* sums) {
  const int64_t blocks = blocks_of(count, kSumBlock);
  double total = 0;
  for (int64_t b = 0; b < blocks; ++b) total += sums[b] = sum_of(weights + b * kSumBlock, std::min(kSumBlock, count - b * kSumBlock));
  double target = uniform * total;
  const int64_t first = first_above(sums, blocks, target) * kSumBlock;
  return first + first_above(weights + first, std::min(kSumBlock, count - first), target);
}

// The logits of a row that top_k (a bound of it) and min_p leave.
Candidates select(const float* logits, int64_t vocab, float peak, const SamplingRule& rule, const Scratch& scratch) {
  Candidates chosen{scratch.ids, scratch.values, 0};
  const int64_t size = peak_block(vocab), blocks = blocks_of(vocab, size);
  float bound = -std::numeric_limits<float>::infinity();
  if (rule.top_k > 0 && rule.top_k <= blocks) {
    // Each of k blocks has a logit no smaller than the k-th largest peak.
    bound = kth_largest(scratch.peaks, blocks, rule.top_k, scratch.copy);
  }
  const auto wanted = [&](float logit) { return logit >= bound && (logit - peak) * rule.inverse_temperature >= rule.log_min_p; };
  for (int64_t b = 0; b < blocks; ++b) {
    if (!wanted(scratch.peaks[b])) continue;
    for (int64_t i = b * size, end = std::min(i + size, vocab); i < end; ++i) {
      chosen.ids[chosen.count] = static_cast<int32_t>(i), chosen.values[chosen.count] = logits[i];
      chosen.count += wanted(logits[i]);
    }
  }
  return chosen;
}

// The largest logit, and the first block that has it; its value is not finite where a logit is NaN.
struct Peak {
  float value;
  int64_t block;
};

// The same blocks' peaks are left in `scratch`.
Peak find_peak(const float* logits, int64_t vocab, const Isa& kernels, const Scratch& scratch) {
  const int64_t size = peak_block(vocab), blocks = blocks_of(vocab, size);
  kernels.block_peaks(logits, vocab, size, scratch.peaks);
  Peak peak{scratch.peaks[0], 0};
  for (int64_t b = 0; b < blocks; ++b) {
    if (std::isnan(scratch.peaks[b])) return {scratch.peaks[b], b};
    if (scratch.peaks[b] > peak.value) peak = {scratch.peaks[b], b};
  }
  return peak;
}

int32_t sample_row(const float* logits, int64_t vocab, const SamplingRule& rule, double uniform, const Isa& kernels, const Scratch& scratch) {
  const auto [peak, highest] = find_peak(logits, vocab, kernels, scratch);
  if (!std::isfinite(peak)) return -1;
  if (rule.inverse_temperature == 0) {
    const float* first = logits + highest * peak_block(vocab);
    while (*first != peak) ++first;
    return static_cast<int32_t>(first - logits);
  }
  const bool all = (rule.top_k <= 0 || rule.top_k >= vocab) && rule.log_min_p == -std::numeric_limits<float>::infinity();
  if (all && rule.top_p >= 1) {
    kernels.sampling_weights(logits, vocab, peak, rule.inverse_temperature, scratch.values);
    return static_cast<int32_t>(draw(scratch.values, vocab, uniform, scratch.sums));
  }
  Candidates chosen = select(logits, vocab, peak, rule, scratch);
  if (rule.top_k > 0 && chosen.count > rule.top_k) {
    const float kth = kth_largest(chosen.values, chosen.count, rule.top_k, scratch.copy);
    const int64_t above = std::count_if(chosen.values, chosen.values + chosen.count, [&](float value) { return value > kth; });
    chosen.keep_above(kth, rule.top_k - above);
  }
  kernels.sampling_weights(chosen.values, chosen.count, peak, rule.inverse_temperature, chosen.values);
  if (rule.top_p < 1) keep_nucleus(chosen, rule.top_p, scratch);
  return chosen.ids[draw(chosen.values, chosen.count, uniform, scratch.sums)];
}

// The log of the sum of e^logit, and the ids of the `count` largest logits, the largest first, of equal ones the first; NaN and no ids where a
// logit is NaN or the largest is not finite.
double describe_row(const float* logits, int64_t vocab, int64_t count, int32_t* top, const Isa& kernels, const Scratch& scratch) {
  const float peak = find_peak(logits, vocab, kernels, scratch).value;
  if (!std::isfinite(peak)) {
    std::fill(top, top + count, -1);
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (count > 0) {
    const SamplingRule largest{1, -std::numeric_limits<float>::infinity(), 1, count};
    const Candidates chosen = select(logits, vocab, peak, largest, scratch);
    std::partial_sort_copy(chosen.ids, chosen.ids + chosen.count, top, top + count, [&](int32_t a, int32_t b) {
      return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    });
  }
  kernels.sampling_weights(logits, vocab, peak, 1, scratch.values);
  return peak + std::log(sum_of(scratch.values, vocab));
}

// Calls work(row, scratch) for all rows.
template <class Work>
void for_rows(int64_t rows, int64_t vocab, const Parallel& parallel, const Work& work) {
  if (vocab < 1 || vocab > std::numeric_limits<int32_t>::max())
    throw InvalidArgument("vocab is " + std::to_string(vocab) + ", must be 1 to 2147483647");
  const int64_t blocks = blocks_of(vocab, peak_block(vocab)), sums_of_blocks = blocks_of(vocab, kSumBlock);
  const int64_t doubles = sums_of_blocks + kBuckets, words = 3 * vocab + blocks;
  const auto bytes = static_cast<int64_t>(doubles * sizeof(double) + kBuckets * sizeof(int64_t) + words * sizeof(float));
  const auto row = [&](int64_t i, int8_t* memory) {
    auto* const sums = reinterpret_cast<double*>(memory);
    auto* const counts = reinterpret_cast<int64_t*>(sums + doubles);
    auto* const values = reinterpret_cast<float*>(counts + kBuckets);
    work(i, Scratch{values, values + vocab, reinterpret_cast<int32_t*>(values + 2 * vocab), values + 3 * vocab, sums, sums + sums_of_blocks, counts});
  };
  const bool serial = rows * vocab <= kSerialLogits;
  const Parallel alone{[](int64_t tasks, const std::function<void(int64_t)>& task) {
                         for (int64_t i = 0; i < tasks; ++i) task(i);
                       }, 1};
  run_with_scratch<int8_t>(serial ? alone : parallel, rows, bytes, row);
}

}  // namespace

void run_sample_rows(const SampleRows& op, const Parallel& parallel) {
  const Isa& kernels = isa();
  for_rows(op.rows, op.vocab, parallel, [&](int64_t i, const Scratch& scratch) {
    op.tokens[i] = sample_row(op.logits + i * op.vocab, op.vocab, op.rules[i], op.uniforms[i], kernels, scratch);
  });
}

void run_describe_rows(const DescribeRows& op, const Parallel& parallel) {
  if (op.count < 0 || op.count > op.vocab)
    throw InvalidArgument("count is " + std::to_string(op.count) + ", must be 0 to " + std::to_string(op.vocab));
  const Isa& kernels = isa();
  for_rows(op.rows, op.vocab, parallel, [&](int64_t i, const Scratch& scratch) {
    op.log_sums[i] = describe_row(op.logits + i * op.vocab, op.vocab, op.count, op.top + i * op.count, kernels, scratch);
  });
}

}  // namespace qwenrt

// The ops: what they demand of their inputs, and how their work is divided.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "sampling.h"
#include "swiglu.h"

namespace qwenrt {

// What a caller did wrong: names the input, the index and the value.
struct InvalidArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs work(0) ... work(tasks - 1), in any order, on `threads` threads or fewer, and returns when all are done. `work` never throws.
struct Parallel {
  std::function<void(int64_t tasks, const std::function<void(int64_t)>& work)> run;
  int64_t threads;
};

// Throws InvalidArgument for what no call could make right.
void check_attributes(const PagedAttention& op);

// Throws InvalidArgument unless it is a weight for `depth` columns: integers, or where they are allowed floats.
void check_weight(const Weight& weight, int64_t depth, bool floats);

// Throw InvalidArgument before anything is written. The sizes in `op` must be the true sizes of its tensors.
void run_paged_attention(const PagedAttention& op, const Parallel& parallel);
void run_linear(const Linear& op, const Parallel& parallel);
void run_lora(const Lora& op, const Parallel& parallel);
void run_mixture_of_experts(const MixtureOfExperts& op, const Parallel& parallel);
void run_embedding(const Embedding& op);
void run_sample_rows(const SampleRows& op, const Parallel& parallel);
void run_describe_rows(const DescribeRows& op, const Parallel& parallel);
void run_swiglu(const SwiGlu& op, const Parallel& parallel);

}  // namespace qwenrt

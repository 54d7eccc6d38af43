// What sampling does with whole rows of logits, for one instruction set: include after defining QWENRT_ISA.
#include <algorithm>
#include <limits>

#include "lanes.h"
#include "sampling.h"

namespace qwenrt::QWENRT_ISA {

// The largest of each `size` of x; NaN where one of them is NaN.
void block_peaks(const float* x, int64_t count, int64_t size, float* peaks) {
  for (int64_t first = 0; first < count; first += size) {
    const int64_t end = std::min(first + size, count);
    float peak = -std::numeric_limits<float>::infinity();
    bool ordered = true;
    int64_t i = first;
    if (end - i >= kLanes) {
      Floats most = load(x + i);
      Ints same = (Ints)(most == most);
      for (i += kLanes; i + kLanes <= end; i += kLanes) {
        const Floats v = load(x + i);
        most = larger(most, v);
        same &= (Ints)(v == v);
      }
      peak = largest(most);
      for (int lane = 0; lane < kLanes; ++lane) ordered = ordered && same[lane] != 0;
    }
    for (; i < end; ++i) {
      peak = std::max(peak, x[i]);
      ordered = ordered && x[i] == x[i];
    }
    *peaks++ = ordered ? peak : std::numeric_limits<float>::quiet_NaN();
  }
}

// out = e^((x - peak) * scale), for peak the largest of x.
void sampling_weights(const float* x, int64_t count, float peak, float scale, float* out) {
  const Floats peaks = broadcast(peak), scales = broadcast(scale), least = broadcast(-100);  // e^-100 is 0 here
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, exp_of_negative(larger((load(x + i) - peaks) * scales, least)));
  if (i == count) return;
  float rest[kLanes];
  std::fill(rest, rest + kLanes, peak);
  std::copy(x + i, x + count, rest);
  store(rest, exp_of_negative(larger((load(rest) - peaks) * scales, least)));
  std::copy(rest, rest + (count - i), out + i);
}

}  // namespace qwenrt::QWENRT_ISA

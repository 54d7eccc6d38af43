// silu(gate) * up for one instruction set: include after defining QWENRT_ISA.
#include <algorithm>

#include "lanes.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// x / (1 + e^-x), with an exponential that cannot overflow.
inline Floats silu(Floats x) {
  const Floats e = exp_of_negative(x < zero() ? x : -x);
  return x * (x < zero() ? e : broadcast(1)) / (broadcast(1) + e);
}

}  // namespace

void swiglu(const float* gate, const float* up, float* out, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, silu(load(gate + i)) * load(up + i));
  if (i == count) return;
  float g[kLanes] = {}, u[kLanes] = {};
  std::copy(gate + i, gate + count, g);
  std::copy(up + i, up + count, u);
  store(g, silu(load(g)) * load(u));
  std::copy(g, g + (count - i), out + i);
}

}  // namespace qwenrt::QWENRT_ISA

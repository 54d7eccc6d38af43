// What comes before attention for one instruction set, of each token: q, k and v normed and rotated, and k and v written to the pool. Include
// after defining QWENRT_ISA.
#include <cmath>
#include <cstring>

#include "attention.h"
#include "lanes.h"
#include "rounding.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// RMSNorm (if there is a weight) and half-split rotation of a head, times `factor`, to `out`. x and out may be the same.
void norm_and_rotate(const PagedAttention& op, const float* x, const float* weight, const float* angles, float factor,
                     float* out) {
  const int64_t width = op.head_dim, half = width / 2;
  Floats inverse = zero();
  if (weight != nullptr) {
    Floats squares = zero();
    for (int64_t d = 0; d < width; d += kLanes) squares = multiply_add(load(x + d), load(x + d), squares);
    inverse = broadcast(1 / std::sqrt(sum(squares) / static_cast<float>(width) + op.norm_eps));
  }
  const auto normed = [&](int64_t d) { return weight == nullptr ? load(x + d) : load(x + d) * inverse * load(weight + d); };
  if (half % kLanes == 0) {
    for (int64_t d = 0; d < half; d += kLanes) {
      const Floats first = normed(d), second = normed(half + d), cosine = load(angles + d), sine = load(angles + half + d);
      store(out + d, (first * cosine - second * sine) * broadcast(factor));
      store(out + half + d, (second * cosine + first * sine) * broadcast(factor));
    }
    return;
  }
  for (int64_t d = 0; d < width; d += kLanes) store(out + d, normed(d));
  for (int64_t d = 0; d < half; ++d) {
    const float first = out[d], second = out[half + d], cosine = angles[d], sine = angles[half + d];
    out[d] = (first * cosine - second * sine) * factor;
    out[half + d] = (second * cosine + first * sine) * factor;
  }
}

template <class T>
void write_row(const float* from, int64_t width, T* to) {
  for (int64_t d = 0; d < width; d += kLanes) store(to + d, load(from + d));
}

void write_row(const float* from, int64_t width, int8_t* to) {
  std::memset(to, 0, static_cast<size_t>(width));
  const float scale = round_values(from, width, 127, [&](int64_t d, const Ints& whole) { store_bytes(to + d, whole); });
  std::memcpy(to + width, &scale, sizeof scale);
}

template <class T>
void write_keys_and_values(const PagedAttention& op, int64_t seq, int64_t token, const float* k, const float* v) {
  const int64_t width = op.head_dim, position = op.positions[token];
  T* pool = static_cast<T*>(op.kv_cache_out);
  float* rotated = op.attn + token * op.num_heads * width;  // free until the queries go there
  for (int64_t head = 0; head < op.num_kv_heads; ++head) {
    norm_and_rotate(op, k + head * width, op.k_norm, op.rope + position * width, 1, rotated);
    T* row = pool + op.slot(seq, head, position);
    write_row(rotated, width, row);
    write_row(v + head * width, width, row + op.v_offset());
  }
}

void prepare_token(const PagedAttention& op, int64_t seq, int64_t token) {
  const int64_t width = op.head_dim;
  const float* q = op.qkv + token * (op.num_heads + 2 * op.num_kv_heads) * width;
  const float* k = q + op.num_heads * width;
  const float* v = k + op.num_kv_heads * width;
  if (op.kv_type == ElementType::kFloat16) {
    write_keys_and_values<Float16>(op, seq, token, k, v);
  } else if (op.kv_type == ElementType::kInt8) {
    write_keys_and_values<int8_t>(op, seq, token, k, v);
  } else {
    write_keys_and_values<float>(op, seq, token, k, v);
  }
  const float* angles = op.rope + op.positions[token] * width;
  for (int64_t head = 0; head < op.num_heads; ++head)
    norm_and_rotate(op, q + head * width, op.q_norm, angles, op.scale, op.attn + (token * op.num_heads + head) * width);
}

}  // namespace
}  // namespace qwenrt::QWENRT_ISA

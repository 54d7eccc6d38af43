// Random calls of the ops, right ones and such as a broken or hostile caller makes, for a sanitizer to watch. Every buffer has exactly
// the size that its tensor says. usage: fuzz CALLS [SEED]; exit status 1 and a message where an op misbehaves.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "c_api.h"
#include "run.h"
#include "thread_pool.h"

namespace {

std::mt19937_64 generator;

int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }
bool chance(int percent) { return pick(1, 100) <= percent; }

// Exactly as large as asked, so that reading past the end is seen.
template <class T>
struct Buffer {
  explicit Buffer(int64_t count) : count(count), data(new T[static_cast<size_t>(count)]) {}
  T& operator[](int64_t i) { return data[static_cast<size_t>(i)]; }
  int64_t count;
  std::unique_ptr<T[]> data;
};

void fill(Buffer<float>& buffer) {
  for (int64_t i = 0; i < buffer.count; ++i) buffer[i] = static_cast<float>(pick(-1000, 1000)) / 500;
}

int32_t hostile() {
  const int32_t values[] = {std::numeric_limits<int32_t>::min(), -1, 0, 1, 7, 1 << 16, std::numeric_limits<int32_t>::max()};
  return chance(50) ? values[pick(0, 6)] : static_cast<int32_t>(pick(-20, 200));
}

[[noreturn]] void fail(const char* what, const char* detail) {
  std::printf("%s: %s\n", what, detail);
  std::exit(1);
}

// A call that keeps the rules, if nothing is changed in it.
struct Call {
  int64_t kv_heads = pick(1, 3), heads = kv_heads * (chance(10) ? pick(30, 60) : pick(1, 5)), head_dim = 8 * (heads < 30 && chance(10) ? pick(7, 80) : pick(1, 6));
  int64_t block_size = pick(1, 20), seqs = pick(0, 4);
  std::vector<int64_t> count, length;
  int64_t tokens = 0, blocks = 0, max_blocks = 0, longest = 0;

  Call() {
    for (int64_t s = 0; s < seqs; ++s) {
      count.push_back(chance(50) ? pick(0, 2) : pick(0, 70));
      length.push_back(count.back() + (chance(10) ? pick(0, 1200) : pick(0, 40)));
      tokens += count.back();
      blocks += (length.back() + block_size - 1) / block_size;
      longest = std::max(longest, length.back());
    }
    max_blocks = (longest + block_size - 1) / block_size + pick(0, 2);
  }
};

template <class Kv>
void paged_attention(int32_t kv_type, Kv nan, int64_t& refused) {
  Call call;
  const int64_t padding = pick(0, 2), spare = pick(0, 2), tokens = call.tokens + padding, blocks = call.blocks + spare;
  const int64_t max_positions = call.longest + pick(0, 2), width = call.head_dim;
  Buffer<float> qkv(tokens * (call.heads + 2 * call.kv_heads) * width), q_norm(width), k_norm(width), rope(max_positions * width);
  Buffer<float> attn(tokens * call.heads * width);
  Buffer<int32_t> positions(tokens), tables(call.seqs * call.max_blocks), lens(call.seqs), start(call.seqs + 1);
  for (Buffer<float>* buffer : {&qkv, &q_norm, &k_norm, &rope}) fill(*buffer);
  const int64_t row_elements = kv_type == QWENRT_INT8 ? width + 4 : width;
  Buffer<Kv> pool(blocks * 2 * call.kv_heads * call.block_size * row_elements);
  for (int64_t i = 0; i < pool.count; ++i) pool[i] = nan;

  std::vector<int32_t> free_blocks;
  for (int64_t b = 0; b < blocks; ++b) free_blocks.push_back(static_cast<int32_t>(b));
  std::shuffle(free_blocks.begin(), free_blocks.end(), generator);
  for (int64_t i = 0; i < tables.count; ++i) tables[i] = hostile();
  for (int64_t i = 0; i < tokens; ++i) positions[i] = hostile();
  start[0] = 0;
  for (int64_t s = 0; s < call.seqs; ++s) {
    const int64_t count = call.count[static_cast<size_t>(s)], length = call.length[static_cast<size_t>(s)];
    start[s + 1] = static_cast<int32_t>(start[s] + count);
    lens[s] = static_cast<int32_t>(length);
    for (int64_t i = 0; i < count; ++i) positions[start[s] + i] = static_cast<int32_t>(length - count + i);
    for (int64_t i = 0; i * call.block_size < length; ++i) {
      const int64_t block = tables[s * call.max_blocks + i] = free_blocks.back();
      free_blocks.pop_back();
      for (int64_t head = 0; head < 2 * call.kv_heads; ++head)
        for (int64_t slot = 0; slot < call.block_size && i * call.block_size + slot < length - count; ++slot) {
          Kv* row = &pool[((block * 2 * call.kv_heads + head) * call.block_size + slot) * row_elements];
          for (int64_t d = 0; d < width; ++d) row[d] = static_cast<Kv>(kv_type == QWENRT_INT8 ? pick(-128, 127) : pick(0, 2));
          const float scale = static_cast<float>(pick(0, 100)) / 5000;
          if (kv_type == QWENRT_INT8) std::memcpy(row + width, &scale, sizeof scale);
        }
    }
  }

  QwenrtPagedAttention op{};
  op.qkv = qkv.data.get(), op.rope = rope.data.get(), op.positions = positions.data.get();
  op.q_norm = chance(70) ? q_norm.data.get() : nullptr, op.k_norm = chance(70) ? k_norm.data.get() : nullptr;
  op.block_tables = tables.data.get(), op.seq_lens = lens.data.get(), op.query_start = start.data.get();
  op.attn = attn.data.get(), op.num_tokens = tokens, op.max_positions = max_positions, op.num_blocks = blocks;
  op.num_seqs = call.seqs, op.max_blocks = call.max_blocks, op.num_heads = call.heads, op.num_kv_heads = call.kv_heads;
  op.head_dim = width, op.block_size = call.block_size, op.sliding_window = chance(70) ? -1 : pick(1, 90);
  op.scale = 0.1f, op.norm_eps = 1e-6f, op.kv_type = kv_type;

  bool valid = true;
  if (chance(50)) {
    valid = false;  // perhaps
    for (int64_t i = pick(1, 3); i > 0; --i) {
      Buffer<int32_t>* const targets[] = {&positions, &tables, &lens, &start};
      Buffer<int32_t>& target = *targets[pick(0, 3)];
      if (target.count > 0) target[pick(0, target.count - 1)] = hostile();
    }
    int64_t* const attributes[] = {&op.num_heads, &op.num_kv_heads, &op.head_dim, &op.block_size, &op.sliding_window};
    // Those that a tensor's size goes with may only become such as no tensor could have.
    if (chance(20)) *attributes[pick(0, 4)] = chance(50) ? -pick(2, 1000) : std::numeric_limits<int64_t>::max() - pick(0, 9);
    if (chance(10)) op.kv_type = QWENRT_BFLOAT16;
    if (chance(5)) op.scale = std::numeric_limits<float>::infinity();
  }

  Buffer<Kv> other(pool.count);
  const bool in_place = chance(70);
  const std::vector<Kv> before(pool.data.get(), pool.data.get() + pool.count);
  op.kv_cache = pool.data.get();
  op.kv_cache_out = in_place ? pool.data.get() : other.data.get();
  for (int64_t i = 0; i < attn.count; ++i) attn[i] = -77;
  char error[300] = "";
  if (qwenrt_paged_attention(&op, static_cast<int>(pick(1, 4)), error, static_cast<size_t>(chance(5) ? 10 : sizeof error)) != 0) {
    ++refused;
    if (valid) fail("a right call was refused", error);
    if (error[0] == '\0') fail("refused without a reason", "");
    for (int64_t i = 0; i < attn.count; ++i)
      if (attn[i] != -77) fail("attn was written by a call that was refused", error);
    if (pool.count > 0 && std::memcmp(before.data(), pool.data.get(), before.size() * sizeof(Kv)) != 0)
      fail("the pool was written by a call that was refused", error);
  } else if (valid) {
    for (int64_t i = 0; i < attn.count; ++i)
      if (!std::isfinite(attn[i])) fail("attn is not finite", "what lies in an unwritten slot leaked");
    for (int64_t i = call.tokens * call.heads * width; i < attn.count; ++i)
      if (attn[i] != 0) fail("a padding row is not 0", "");
  }
  if (!in_place && pool.count > 0 && std::memcmp(before.data(), pool.data.get(), before.size() * sizeof(Kv)) != 0)
    fail("kv_cache was written", "though kv_cache_out is another buffer");
}

template <class Weight>
void linear(int32_t weight_type) {
  const int64_t rows = pick(0, 70), depth = chance(20) ? pick(1000, 1100) : pick(0, 50), width = pick(0, 70);
  Buffer<float> x(rows * depth), bias(width), y(rows * width);
  Buffer<Weight> weight(width * depth);
  fill(x), fill(bias);
  for (int64_t i = 0; i < weight.count; ++i) weight[i] = static_cast<Weight>(pick(0, 3));
  QwenrtLinear op{};
  op.x = x.data.get(), op.bias = chance(50) ? bias.data.get() : nullptr, op.y = y.data.get(), op.rows = rows, op.depth = depth;
  op.weight.data = weight.data.get(), op.weight.width = width, op.weight.depth = depth, op.weight.type = weight_type;
  char error[100];
  if (qwenrt_linear(&op, static_cast<int>(pick(1, 4)), error, sizeof error) != 0) fail("Linear was refused", error);
  for (int64_t i = 0; i < y.count; ++i)
    if (!std::isfinite(y[i])) fail("y is not finite", "");
}

template <class Weight>
void mixture_of_experts(int32_t weight_type) {
  const int64_t tokens = chance(10) ? pick(1000, 1100) : pick(0, 40), hidden = pick(0, 70), inner = pick(0, 70);
  const int64_t experts = pick(1, 9);
  Buffer<float> x(tokens * hidden), router(tokens * experts), y(tokens * hidden);
  Buffer<Weight> gate_up(experts * 2 * inner * hidden), down(experts * hidden * inner);
  fill(x), fill(router);
  for (Buffer<Weight>* buffer : {&gate_up, &down})
    for (int64_t i = 0; i < buffer->count; ++i) (*buffer)[i] = static_cast<Weight>(pick(0, 3));
  const bool valid = chance(80);
  if (!valid && router.count > 0) {
    const float values[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1e38f};
    for (int64_t i = pick(1, 3); i > 0; --i) router[pick(0, router.count - 1)] = values[pick(0, 2)];
  }
  const int64_t top_k = valid || chance(50) ? pick(1, experts) : pick(-2, 2) * (experts + 1);
  const QwenrtWeight gate_ups{gate_up.data.get(), nullptr, nullptr, nullptr, nullptr, experts * 2 * inner, hidden, 0, weight_type};
  const QwenrtWeight downs{down.data.get(), nullptr, nullptr, nullptr, nullptr, experts * hidden, inner, 0, weight_type};
  const QwenrtMixtureOfExperts op{x.data.get(), router.data.get(), gate_ups, downs, y.data.get(), tokens,
                                  hidden,       inner,             experts,  top_k, chance(50)};
  char error[200];
  if (qwenrt_mixture_of_experts(&op, static_cast<int>(pick(1, 4)), error, sizeof error) != 0) {
    if (top_k >= 1 && top_k <= experts) fail("MixtureOfExperts was refused", error);
    return;
  }
  if (top_k < 1 || top_k > experts) fail("MixtureOfExperts took", "a wrong top_k");
  for (int64_t i = 0; i < y.count; ++i)
    if (valid && !std::isfinite(y[i])) fail("y is not finite", "");
}

// A weight of any bytes in panels, 4-bit pairs or int8, its groups (of int8 too) perhaps with scales and offsets of their own.
struct Panels {
  Buffer<uint8_t> codes, groups;
  Buffer<float> scale, group_scale, group_offset;
  QwenrtWeight weight;

  Panels(int64_t width, int64_t depth, bool pairs, int64_t group_size)
      : Panels(width, (depth + unit(group_size) - 1) / unit(group_size) * unit(group_size), pairs, group_size, 0) {}

 private:
  static int64_t unit(int64_t group_size) { return std::max(int64_t{64}, group_size); }
  Panels(int64_t width, int64_t filled, bool pairs, int64_t group_size, int)
      : codes((width + 15) / 16 * filled * 16 / (pairs ? 2 : 1)),
        groups(pairs ? (width + 15) / 16 * filled / group_size * 16 : 0),
        scale(width),
        group_scale((width + 15) / 16 * filled / group_size * 16),
        group_offset(group_scale.count) {
    fill(scale), fill(group_scale), fill(group_offset);
    for (Buffer<uint8_t>* buffer : {&codes, &groups})
      for (int64_t i = 0; i < buffer->count; ++i) (*buffer)[i] = static_cast<uint8_t>(pick(0, 255));
    const bool scaled = chance(50), raised = scaled && chance(50);
    weight = {codes.data.get(),
              scale.data.get(),
              groups.data.get(),
              scaled ? group_scale.data.get() : nullptr,
              raised ? group_offset.data.get() : nullptr,
              width,
              filled,
              group_size,
              pairs ? QWENRT_UINT8 : QWENRT_INT8};
  }
};

void integer_experts(bool pairs) {
  const int64_t tokens = chance(10) ? pick(1000, 1100) : pick(0, 40), hidden = pick(0, 70), inner = pick(0, 70), experts = pick(1, 9);
  const int64_t group_size = int64_t{8} << pick(0, 4);
  const bool valid = hidden % 16 == 0 && inner % 16 == 0;
  Buffer<float> x(tokens * hidden), router(tokens * experts), y(tokens * hidden);
  fill(x), fill(router);
  const Panels gate_up(experts * 2 * inner, hidden, pairs, group_size), down(experts * hidden, inner, pairs, group_size);
  const QwenrtMixtureOfExperts op{x.data.get(), router.data.get(), gate_up.weight, down.weight, y.data.get(), tokens,
                                  hidden,       inner,             experts,        pick(1, experts), chance(50)};
  char error[200] = "";
  if ((qwenrt_mixture_of_experts(&op, static_cast<int>(pick(1, 4)), error, sizeof error) == 0) != valid) fail("integer experts", error);
}

// Linear and Embedding over the same panels of any bytes.
void integer_weights(bool pairs) {
  const int64_t group_size = int64_t{8} << pick(0, 4);
  const int64_t rows = pick(0, 70), depth = chance(5) ? 0 : chance(20) ? pick(1000, 1100) : pick(0, 80);
  const int64_t width = chance(20) ? pick(100, 300) : pick(0, 70);  // so many that a thread has several tasks
  const Panels panels(width, depth, pairs, group_size);
  const int64_t filled = panels.weight.depth;
  Buffer<float> x(rows * depth), bias(width), y(rows * width), rows_of_weight(rows * depth);
  Buffer<int32_t> ids(rows);
  fill(x), fill(bias);
  QwenrtLinear op{};
  op.x = x.data.get(), op.bias = chance(50) ? bias.data.get() : nullptr, op.y = y.data.get(), op.rows = rows, op.depth = depth;
  op.weight = panels.weight;
  QwenrtEmbedding look_up{ids.data.get(), op.weight, rows_of_weight.data.get(), rows, depth};
  for (int64_t i = 0; i < rows; ++i) ids[i] = width == 0 || chance(1) ? hostile() : static_cast<int32_t>(pick(0, width - 1));
  bool valid = true;
  if (chance(20)) {
    valid = false;  // perhaps
    int64_t* const sizes[] = {&op.weight.depth, &op.weight.group_size};
    if (chance(50)) *sizes[pick(0, 1)] = chance(50) ? -pick(1, 1000) : std::numeric_limits<int64_t>::max() - pick(0, 99);
    if (chance(20)) op.weight.scale = nullptr;
    if (chance(20)) op.weight.groups = nullptr;
    if (chance(20)) op.weight.group_scale = nullptr;
    if (chance(20)) op.depth = filled + pick(1, 100);
    look_up.weight = op.weight, look_up.depth = op.depth;
    // Where nothing was wrong after all, the output has its size.
  }
  char error[200] = "";
  if (qwenrt_linear(&op, static_cast<int>(pick(1, 4)), error, sizeof error) != 0) {
    if (valid) fail("Linear was refused", error);
  } else if (valid) {
    for (int64_t i = 0; i < y.count; ++i)
      if (!std::isfinite(y[i])) fail("y is not finite", "");
  }
  bool known = true;
  for (int64_t i = 0; i < rows; ++i) known = known && ids[i] >= 0 && ids[i] < width;
  if (qwenrt_embedding(&look_up, error, sizeof error) == 0 ? !known : valid && known) fail("Embedding", error);
}

// What adapters add to the rows that name one. Slots that no row names are NaN, and y of rows without one keeps its bits.
void lora() {
  const int64_t rows = chance(10) ? pick(500, 1100) : pick(0, 40), depth = pick(0, 70), width = pick(0, 70), rank = pick(0, 20);
  const int64_t count = pick(0, 5);
  Buffer<float> x(rows * depth), a(count * rank * depth), b(count * width * rank), y(rows * width);
  Buffer<int32_t> adapters(rows);
  fill(x), fill(a), fill(b), fill(y);
  bool known = true;
  std::vector<bool> named(static_cast<size_t>(count));
  for (int64_t i = 0; i < rows; ++i) {
    adapters[i] = i > 0 && chance(80) ? adapters[i - 1] : static_cast<int32_t>(pick(-1, count - 1));
    if (chance(1)) adapters[i] = hostile();
    known = known && adapters[i] >= -1 && adapters[i] < count;
    if (adapters[i] >= 0 && adapters[i] < count) named[static_cast<size_t>(adapters[i])] = true;
  }
  for (int64_t adapter = 0; adapter < count; ++adapter) {
    if (named[static_cast<size_t>(adapter)]) continue;
    std::fill_n(a.data.get() + adapter * rank * depth, rank * depth, std::numeric_limits<float>::quiet_NaN());
    std::fill_n(b.data.get() + adapter * width * rank, width * rank, std::numeric_limits<float>::quiet_NaN());
  }
  const std::vector<float> before(y.data.get(), y.data.get() + y.count);
  const qwenrt::Lora op{x.data.get(), adapters.data.get(), a.data.get(), b.data.get(), y.data.get(), rows, depth, width, rank, count};
  bool refused = false;
  try {
    qwenrt::run_lora(op, qwenrt::thread_pool(static_cast<int>(pick(1, 4))));
  } catch (const qwenrt::InvalidArgument& error) {
    refused = true;
    if (known) fail("Lora was refused", error.what());
  }
  if (!refused && !known) fail("Lora took", "an adapter that is not there");
  for (int64_t i = 0; i < y.count; ++i) {
    const bool kept = y[i] == before[static_cast<size_t>(i)];
    if (!std::isfinite(y[i])) fail("y is not finite", "an adapter that no row names leaked");
    if (!kept && (refused || adapters[i / width] < 0)) fail("y was changed", "in a row without an adapter");
  }
}

void sample_rows() {
  const int64_t rows = pick(0, 5), vocab = chance(20) ? pick(4000, 70000) : pick(1, 70);
  Buffer<float> logits(rows * vocab);
  Buffer<QwenrtSamplingRule> rules(rows);
  Buffer<double> uniforms(rows);
  Buffer<int32_t> tokens(rows);
  const float infinity = std::numeric_limits<float>::infinity();
  const float values[] = {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), 3e38f, -3e38f, 0, 1e-40f};
  fill(logits);
  if (chance(50))
    for (int64_t i = pick(0, 2 * rows); i > 0 && rows > 0; --i) logits[pick(0, logits.count - 1)] = values[pick(0, 6)];
  for (int64_t i = 0; i < rows; ++i) {
    const float scales[] = {0, 1, 0.01f, 1e5f, std::numeric_limits<float>::min()};
    rules[i] = {scales[pick(0, 4)], chance(50) ? -infinity : -static_cast<float>(pick(0, 10)), static_cast<double>(pick(1, 100)) / 100,
                chance(50) ? 0 : pick(1, 2 * vocab)};
    uniforms[i] = static_cast<double>(pick(0, 999)) / 1000;
  }
  const QwenrtSampleRows op{logits.data.get(), rules.data.get(), uniforms.data.get(), tokens.data.get(), rows, vocab};
  char error[100];
  if (qwenrt_sample_rows(&op, static_cast<int>(pick(1, 4)), error, sizeof error) != 0) fail("sampling was refused", error);
  for (int64_t i = 0; i < rows; ++i) {
    bool right = tokens[i] >= -1 && tokens[i] < vocab;
    if (right && tokens[i] >= 0) right = std::isfinite(logits[i * vocab + tokens[i]]);
    if (!right) fail("a token that cannot be drawn", std::to_string(tokens[i]).c_str());
  }
  const int64_t count = pick(0, vocab + 1);
  Buffer<double> log_sums(rows);
  Buffer<int32_t> top(rows * count);
  const QwenrtDescribeRows described{logits.data.get(), log_sums.data.get(), top.data.get(), rows, vocab, count};
  const bool refused = qwenrt_describe_rows(&described, static_cast<int>(pick(1, 4)), error, sizeof error) != 0;
  if (refused != (count > vocab)) fail("log-probabilities were refused or not", error);
  for (int64_t i = 0; !refused && i < rows; ++i) {
    if (std::isnan(log_sums[i]) != (tokens[i] < 0)) fail("a row has a token or log-probabilities, not both", std::to_string(i).c_str());
    for (int64_t j = 0; j < count; ++j) {
      const int32_t id = top[i * count + j];
      if (std::isnan(log_sums[i]) ? id != -1 : id < 0 || id >= vocab) fail("a token that is not there", std::to_string(id).c_str());
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t calls = argc > 1 ? std::atoll(argv[1]) : 1000;
  generator.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0);
  int64_t refused = 0;
  for (int64_t i = 0; i < calls; ++i) {
    const char* const isas[] = {"portable", "avx2", "avx512", nullptr};
    qwenrt_set_isa(isas[pick(0, 3)]);
    switch (pick(0, 4)) {
      case 0:
        paged_attention<uint16_t>(QWENRT_FLOAT16, 0x7e00, refused);
        // All bits set, the scale is NaN.
        paged_attention<int8_t>(QWENRT_INT8, -1, refused);
        break;
      case 1:
        linear<float>(QWENRT_FLOAT32);
        linear<uint16_t>(chance(50) ? QWENRT_FLOAT16 : QWENRT_BFLOAT16);
        mixture_of_experts<float>(QWENRT_FLOAT32);
        mixture_of_experts<uint16_t>(chance(50) ? QWENRT_FLOAT16 : QWENRT_BFLOAT16);
        break;
      case 2:
        integer_weights(chance(50));
        integer_experts(chance(50));
        lora();
        sample_rows();
        break;
      default:
        paged_attention<float>(QWENRT_FLOAT32, std::numeric_limits<float>::quiet_NaN(), refused);
    }
  }
  std::printf("%lld refused\n", static_cast<long long>(refused));
  return 0;
}

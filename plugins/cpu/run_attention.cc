#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa.h"
#include "run.h"
#include "scratch.h"

namespace qwenrt {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 20;
constexpr int64_t kTileRows = 96;     // of a query tile: these share each pass over K and V, and stay in a second-level cache
constexpr int64_t kSerialTokens = 4;  // handing so few tokens to other threads costs more than preparing them

std::string at(const char* input, int64_t index) { return std::string(input) + "[" + std::to_string(index) + "]"; }

[[noreturn]] void fail(const std::string& what, int64_t value, const std::string& why) {
  throw InvalidArgument(what + " is " + std::to_string(value) + why);
}

void check_query_start(const PagedAttention& op) {
  if (op.query_start[0] != 0) fail("query_start[0]", op.query_start[0], ", expected 0");
  for (int64_t s = 0; s < op.num_seqs; ++s)
    if (op.query_start[s + 1] < op.query_start[s])
      fail(at("query_start", s + 1), op.query_start[s + 1],
           ", less than " + at("query_start", s) + " = " + std::to_string(op.query_start[s]));
  if (op.num_rows() > op.num_tokens)
    fail(at("query_start", op.num_seqs), op.num_rows(), ", but qkv has " + std::to_string(op.num_tokens) + " rows");
}

// Block that sequence `owner` writes, from slot `first` to `last`.
struct Written {
  int64_t owner, first, last;
};
using WrittenBlocks = std::unordered_multimap<int64_t, Written>;

void check_written(const PagedAttention& op, int64_t seq, int64_t first, int64_t length, WrittenBlocks& blocks) {
  for (int64_t i = first / op.block_size; i * op.block_size < length; ++i) {
    const int64_t block = op.block_tables[seq * op.max_blocks + i], start = i * op.block_size;
    const Written mine{seq, std::max(first - start, int64_t{0}), std::min(length - start, op.block_size)};
    const auto [begin, end] = blocks.equal_range(block);
    for (auto other = begin; other != end; ++other)
      if (mine.first < other->second.last && other->second.first < mine.last)
        fail("block_tables[" + std::to_string(seq) + ", " + std::to_string(i) + "]", block,
             ": sequences " + std::to_string(other->second.owner) + " and " + std::to_string(seq) + " both write slot " +
                 std::to_string(std::max(mine.first, other->second.first)) + " of it");
    blocks.emplace(block, mine);
  }
}

void check_sequence(const PagedAttention& op, int64_t s, WrittenBlocks& written) {
  const int64_t start = op.query_start[s], end = op.query_start[s + 1], length = op.seq_lens[s], count = end - start;
  if (count == 0) return;
  if (length < count)
    fail(at("seq_lens", s), length, ", less than the " + std::to_string(count) + " rows that query_start gives the sequence");
  if (length > op.max_blocks * op.block_size)
    fail(at("seq_lens", s), length,
         ", but block_tables has " + std::to_string(op.max_blocks) + " columns of " + std::to_string(op.block_size) + " tokens");
  if (length > op.max_positions)
    fail(at("seq_lens", s), length, ", but rope has " + std::to_string(op.max_positions) + " rows");
  for (int64_t row = start; row < end; ++row)
    if (op.positions[row] != length - end + row)
      fail(at("positions", row), op.positions[row],
           ", expected " + std::to_string(length - end + row) + ": the end of " + at("seq_lens", s) + " = " +
               std::to_string(length));
  for (int64_t i = op.first_key(length - count) / op.block_size; i <= (length - 1) / op.block_size; ++i) {
    const int64_t block = op.block_tables[s * op.max_blocks + i];
    if (block < 0 || block >= op.num_blocks)
      fail("block_tables[" + std::to_string(s) + ", " + std::to_string(i) + "]", block,
           ", but kv_cache has " + std::to_string(op.num_blocks) + " blocks");
  }
  check_written(op, s, length - count, length, written);
}

void check(const PagedAttention& op) {
  check_attributes(op);
  check_query_start(op);
  WrittenBlocks written;
  for (int64_t s = 0; s < op.num_seqs; ++s) check_sequence(op, s, written);
}

struct TaskList {
  std::vector<QueryTile> tiles;
  int64_t rows = 0;    // of the largest tile
  int64_t chunks = 0;  // of all tiles
};

// How many KV heads a tile of `count` tokens takes. Rows of many tokens are enough for one tile; of a few, all heads together read
// the pool in long stretches. But every thread should get some of the step's `chunks`.
int64_t heads_of_tile(const PagedAttention& op, int64_t count, int64_t chunks, int64_t threads) {
  if (count * op.group() > op.few_rows()) return 1;
  return std::clamp(op.num_kv_heads * chunks / (4 * threads), int64_t{1}, op.num_kv_heads);
}

TaskList make_tasks(const PagedAttention& op, int64_t threads) {
  TaskList list;
  int64_t chunks = 0;
  for (int64_t s = 0; s < op.num_seqs; ++s)
    if (op.query_start[s] < op.query_start[s + 1]) chunks += (op.seq_lens[s] + kChunkKeys - 1) / kChunkKeys;
  const int64_t tile_tokens = std::max(int64_t{1}, kTileRows / op.group());
  for (int64_t s = 0; s < op.num_seqs; ++s) {
    const int64_t start = op.query_start[s], end = op.query_start[s + 1];
    // The last tokens see most, so they come first: what is left for the end is small.
    for (int64_t last = end; last > start;) {
      const int64_t first = start + (last - start - 1) / tile_tokens * tile_tokens, count = last - first;
      const int64_t heads = heads_of_tile(op, count, chunks, threads);
      for (int64_t head = 0; head < op.num_kv_heads; head += heads) {
        list.tiles.push_back({s, head, std::min(heads, op.num_kv_heads - head), first, op.positions[first], count});
        list.rows = std::max(list.rows, list.tiles.back().rows(op));
        list.chunks += list.tiles.back().chunks(op);
      }
      last = first;
    }
  }
  return list;
}

void prepare_tokens(const PagedAttention& op, const Isa& kernels, const Parallel& parallel) {
  const int64_t rows = op.num_rows();
  const auto prepare = [&](int64_t first, int64_t last) {
    int64_t seq = std::upper_bound(op.query_start, op.query_start + op.num_seqs + 1, first) - op.query_start - 1;
    for (int64_t token = first; token < last; ++token) {
      while (token >= op.query_start[seq + 1]) ++seq;
      kernels.prepare_token(op, seq, token);
    }
  };
  if (rows <= kSerialTokens) return prepare(0, rows);
  parallel.run((rows + kSerialTokens - 1) / kSerialTokens, [&](int64_t task) {
    prepare(task * kSerialTokens, std::min((task + 1) * kSerialTokens, rows));
  });
}

void attend_whole_tiles(const PagedAttention& op, const Isa& kernels, const TaskList& list, const Parallel& parallel) {
  run_with_scratch<float>(parallel, static_cast<int64_t>(list.tiles.size()), attention_scratch(op, list.rows),
                   [&](int64_t task, float* scratch) { kernels.attend(op, list.tiles[static_cast<size_t>(task)], scratch); });
}

void attend_by_chunks(const PagedAttention& op, const Isa& kernels, const TaskList& list, const Parallel& parallel) {
  struct Part {
    const QueryTile* tile;
    int64_t chunk;
    int64_t partials;  // where the tile's begin
  };
  std::vector<Part> parts;
  std::vector<int64_t> partials;
  int64_t floats = 0;
  for (const QueryTile& tile : list.tiles) {
    partials.push_back(floats);
    for (int64_t chunk = tile.first_chunk(op); chunk <= tile.last_chunk(); ++chunk) {
      parts.push_back({&tile, chunk, partials.back()});
      floats += attention_partial(op, tile.rows(op));
    }
  }
  const std::unique_ptr<float[]> memory(new float[static_cast<size_t>(floats)]);
  const int64_t scratch_floats = attention_scratch(op, list.rows);
  run_with_scratch<float>(parallel, static_cast<int64_t>(parts.size()), scratch_floats, [&](int64_t task, float* scratch) {
    const Part& part = parts[static_cast<size_t>(task)];
    kernels.attend_chunk(op, *part.tile, part.chunk, scratch, memory.get() + part.partials);
  });
  run_with_scratch<float>(parallel, static_cast<int64_t>(list.tiles.size()), scratch_floats, [&](int64_t task, float* scratch) {
    const size_t i = static_cast<size_t>(task);
    kernels.merge_chunks(op, list.tiles[i], scratch, memory.get() + partials[i]);
  });
}

}  // namespace

void check_attributes(const PagedAttention& op) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"num_heads", op.num_heads}, {"num_kv_heads", op.num_kv_heads}, {"head_dim", op.head_dim}, {"block_size", op.block_size}};
  for (const auto& [name, size] : sizes)
    if (size < 1 || size > kMaxSize) fail(name, size, "; it must be between 1 and " + std::to_string(kMaxSize));
  if (op.num_heads % op.num_kv_heads != 0)
    fail("num_heads", op.num_heads, ", which is not a multiple of num_kv_heads = " + std::to_string(op.num_kv_heads));
  if (op.head_dim % 8 != 0) fail("head_dim", op.head_dim, "; the CPU kernels need a multiple of 8");
  if (op.sliding_window < 1 && op.sliding_window != -1)
    fail("sliding_window", op.sliding_window, "; it must be positive, or -1 for none");
  if (!std::isfinite(op.scale)) throw InvalidArgument("scale is " + std::to_string(op.scale) + ", which is not finite");
  if (!std::isfinite(op.norm_eps) || op.norm_eps < 0)
    throw InvalidArgument("norm_eps is " + std::to_string(op.norm_eps) + ", which is negative or not finite");
  if (op.kv_type != ElementType::kFloat32 && op.kv_type != ElementType::kFloat16 && op.kv_type != ElementType::kInt8)
    throw InvalidArgument("kv_cache must be float32, float16 or int8");
}

void run_paged_attention(const PagedAttention& op, const Parallel& parallel) {
  check(op);
  const TaskList list = make_tasks(op, parallel.threads);
  const Isa& kernels = isa(op.head_dim);
  if (op.kv_cache_out != op.kv_cache) {
    const int64_t size = op.kv_type == ElementType::kFloat32 ? 4 : op.kv_type == ElementType::kFloat16 ? 2 : 1;
    std::memcpy(op.kv_cache_out, op.kv_cache, static_cast<size_t>(op.pool_elements() * size));
  }
  const int64_t width = op.num_heads * op.head_dim;
  std::fill(op.attn + op.num_rows() * width, op.attn + op.num_tokens * width, 0.0f);
  prepare_tokens(op, kernels, parallel);
  // With fewer tiles than threads can share evenly, long contexts are split. The result has the same bits either way.
  const int64_t tiles = static_cast<int64_t>(list.tiles.size());
  if (tiles < 2 * parallel.threads && list.chunks > tiles) {
    attend_by_chunks(op, kernels, list, parallel);
  } else {
    attend_whole_tiles(op, kernels, list, parallel);
  }
}

}  // namespace qwenrt

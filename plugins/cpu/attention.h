// PagedAttention without any framework: pointers and sizes. The op is specified in qwenrt/plugins/schema.py.
#pragma once

#include <cstdint>

#include "element_type.h"

namespace qwenrt {

// Keys are worked through in tiles, and what the tiles of a chunk add up to is merged chunk by chunk. Both are counted from the
// start of the context, so a row's result has the same bits however the step and the work are divided.
constexpr int64_t kTileKeys = 32;
constexpr int64_t kChunkKeys = 512;

// So many query rows of a KV head or fewer take K and V from where they lie in the pool, and call for what comes next meanwhile.
constexpr int64_t kFewRows = 24, kFewIntegerRows = 8;

struct PagedAttention {
  const float* qkv;             // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  const float* q_norm;          // [head_dim], or null: no norm
  const float* k_norm;          // [head_dim], or null: no norm
  const float* rope;            // [max_positions, head_dim]: cos, then sin
  const int32_t* positions;     // [num_tokens]
  const void* kv_cache;         // [num_blocks, 2, num_kv_heads, block_size, row_elements()]
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  const int32_t* seq_lens;      // [num_seqs]
  const int32_t* query_start;   // [num_seqs + 1]
  float* attn;                  // [num_tokens, num_heads * head_dim]; holds the rotated queries until they are used
  void* kv_cache_out;           // kv_cache, or another pool
  int64_t num_tokens;
  int64_t max_positions;
  int64_t num_blocks;
  int64_t num_seqs;
  int64_t max_blocks;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t sliding_window;  // -1: none
  float scale;
  float norm_eps;
  ElementType kv_type;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t num_rows() const { return query_start[num_seqs]; }  // without padding
  // Of a token's K or V for one head: integers are followed by the float that they are multiples of.
  int64_t row_elements() const { return kv_type == ElementType::kInt8 ? head_dim + int64_t{sizeof(float)} : head_dim; }
  int64_t v_offset() const { return num_kv_heads * block_size * row_elements(); }
  int64_t pool_elements() const { return num_blocks * 2 * v_offset(); }

  int64_t few_rows() const { return kv_type == ElementType::kInt8 ? kFewIntegerRows : kFewRows; }

  // Where in the pool a sequence keeps the K of a position; its V lies v_offset() further.
  int64_t slot(int64_t seq, int64_t kv_head, int64_t position) const {
    const int64_t block = block_tables[seq * max_blocks + position / block_size];
    return ((block * 2 * num_kv_heads + kv_head) * block_size + position % block_size) * row_elements();
  }

  int64_t first_key(int64_t position) const {
    return sliding_window > 0 && position >= sliding_window ? position - sliding_window + 1 : 0;
  }
};

// Query rows that are worked on together: those of `count` consecutive tokens of a sequence for the query heads of some KV heads.
// Row (i * count + token) * group + head is that of KV head i of the tile.
struct QueryTile {
  int64_t seq;
  int64_t kv_head;   // first
  int64_t kv_heads;  // how many
  int64_t token;     // first, a row of qkv
  int64_t position;  // of that token
  int64_t count;

  int64_t rows(const PagedAttention& op) const { return kv_heads * count * op.group(); }
  int64_t first_chunk(const PagedAttention& op) const { return op.first_key(position) / kChunkKeys; }
  int64_t last_chunk() const { return (position + count - 1) / kChunkKeys; }
  int64_t chunks(const PagedAttention& op) const { return last_chunk() - first_chunk(op) + 1; }
};

}  // namespace qwenrt

// Linear with bfloat16 weights on tiles, about as exact as in float32: x is the sum of three bfloat16s, "parts", whose products with a weight
// are exact. (float32 and float16 weights would need parts too, and to make them takes longer than memory takes to read the weights of a
// decoding step.) Parts and weights below 2^-126 count as 0.
#pragma once

#include "lanes.h"
#include "linear.h"
#include "tiles.h"

namespace qwenrt::QWENRT_ISA {
namespace {

// So many steps are summed up by themselves, then added to those before, which keeps rounding errors small.
constexpr int64_t kChunkSteps = kTileChunk / kTileStep;
constexpr int kBlockTiles = 4;
constexpr int64_t kDirectGroups = 4;  // for whom weights are read where they lie

// Of 16 floats each, pairs of bfloat16s.
__m512i pairs(Floats first, Floats second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second));
}
Floats cut(Floats v) { return (Floats)((Ints)v & -0x10000); }
Floats half_up(Floats v) { return (Floats)((Ints)v + 0x8000); }

// The parts of floats, smallest first. The largest is cut off, so that it never becomes infinite, the next rounded, so that the last has
// either sign. Of what is not finite one part is not finite either.
void split(Floats a, Floats b, __m512i (&parts)[3]) {
  const Floats a_rest = a - cut(a), b_rest = b - cut(b), a_middle = half_up(a_rest), b_middle = half_up(b_rest);
  parts[0] = pairs(a_rest - cut(a_middle), b_rest - cut(b_middle));
  parts[1] = pairs(a_middle, b_middle);
  parts[2] = pairs(a, b);
}

__mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1); }

// Rows i to i + 3 of the transpose of 16 rows of words, `stride` words apart; `from` points at column i of the first.
struct FourRows {
  Floats row[4];
};
FourRows transposed(const float* from, int64_t stride) {
  Floats four[4];  // [j]: four numbers each of rows j, j + 4, j + 8 and j + 12
  for (int j = 0; j < 4; ++j) {
    four[j] = _mm512_castps128_ps512(_mm_loadu_ps(from + j * stride));
    four[j] = _mm512_insertf32x4(four[j], _mm_loadu_ps(from + (j + 4) * stride), 1);
    four[j] = _mm512_insertf32x4(four[j], _mm_loadu_ps(from + (j + 8) * stride), 2);
    four[j] = _mm512_insertf32x4(four[j], _mm_loadu_ps(from + (j + 12) * stride), 3);
  }
  const Floats a = _mm512_unpacklo_ps(four[0], four[1]), b = _mm512_unpackhi_ps(four[0], four[1]);
  const Floats c = _mm512_unpacklo_ps(four[2], four[3]), d = _mm512_unpackhi_ps(four[2], four[3]);
  return {{_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xee), _mm512_shuffle_ps(b, d, 0x44), _mm512_shuffle_ps(b, d, 0xee)}};
}

// Weights of some tiles of 16 channels: a step of a channel is 64 bytes. All strides are in bytes.
struct Channels {
  const char* data;
  int64_t row_stride, step_stride, tile_stride;
};

// Adds the products of a tile of weights with the parts of x in tiles 4 to 6, smallest first, to tile Sums.
template <int Sums>
void multiply_step(const char* data, const Channels& w) {
  load_tile<7>(data + Sums * w.tile_stride, w.row_stride);
  multiply_tiles<Sums, 7, 4>();
  multiply_tiles<Sums, 7, 5>();
  multiply_tiles<Sums, 7, 6>();
}

// The products of a chunk to `sums` [tile, channel, row of x], or added to them unless they are the first.
template <int Tiles>
void multiply_chunk(const Channels& w, const uint32_t* x, int64_t steps, int64_t columns, bool first, float* sums) {
  const int64_t tile = kTile * columns, stride = columns * 4;
  zero_tile<0>();
  if constexpr (Tiles > 1) zero_tile<1>();
  if constexpr (Tiles > 2) zero_tile<2>();
  if constexpr (Tiles > 3) zero_tile<3>();
  const char* data = w.data;
  for (int64_t s = 0; s < steps; ++s, x += kRowParts * tile, data += w.step_stride) {
    load_tile<4>(x, stride);
    load_tile<5>(x + tile, stride);
    load_tile<6>(x + 2 * tile, stride);
    multiply_step<0>(data, w);
    if constexpr (Tiles > 1) multiply_step<1>(data, w);
    if constexpr (Tiles > 2) multiply_step<2>(data, w);
    if constexpr (Tiles > 3) multiply_step<3>(data, w);
  }
  alignas(64) float fresh[Tiles * kTile * kTile];
  float* to = first ? sums : fresh;
  store_tile<0>(to, stride);
  if constexpr (Tiles > 1) store_tile<1>(to + tile, stride);
  if constexpr (Tiles > 2) store_tile<2>(to + 2 * tile, stride);
  if constexpr (Tiles > 3) store_tile<3>(to + 3 * tile, stride);
  if (first) return;
  for (int64_t i = 0; i < Tiles * tile; i += kLanes) store(sums + i, load(sums + i) + load(fresh + i));
}

__mmask32 first_words(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// `steps` of `tiles` tiles from `channel` and column k on as [tile, step], zeros beyond the matrix.
Channels copy_channels(const Linear& op, int64_t channel, int64_t tiles, int64_t k, int64_t steps, char* to) {
  const BFloat16* data = static_cast<const BFloat16*>(op.weight.data) + channel * op.depth + k;
  for (int64_t i = 0; i < tiles * kTile; ++i)
    for (int64_t s = 0; s < steps; ++s) {
      __m512i words = _mm512_setzero_si512();
      if (channel + i < op.weight.width) words = _mm512_maskz_loadu_epi16(first_words(op.depth - k - s * kTileStep), data + i * op.depth + s * kTileStep);
      _mm512_store_si512(to + ((i / kTile * steps + s) * kTile + i % kTile) * 64, words);
    }
  return {to, 64, kTile * 64, steps * kTile * 64};
}

// y of a tile of channels, those before `last`, and a group of rows.
void write_tile(const Linear& op, int64_t channel, int64_t last, int64_t row, int64_t columns, const float* sums) {
  const __mmask16 here = first_lanes(last - channel);
  const Floats bias = op.bias == nullptr ? zero() : _mm512_maskz_loadu_ps(here, op.bias + channel);
  const int64_t rows = op.rows - row < columns ? op.rows - row : columns;
  for (int64_t m = 0; m < rows; m += 4) {
    const FourRows four = transposed(sums + m, columns);
    for (int64_t i = 0; i < 4 && m + i < rows; ++i)
      _mm512_mask_storeu_ps(op.y + (row + m + i) * op.weight.width + channel, here, op.bias == nullptr ? four.row[i] : four.row[i] + bias);
  }
}

}  // namespace

void split_rows(const Linear& op, const SplitRows& x, int64_t group) {
  const int64_t first = group * x.columns, rows = op.rows - first < x.columns ? op.rows - first : x.columns;
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  alignas(64) float by_row[kRowParts][kTile * kTile] = {};
  uint32_t* to = x.step(group, 0);
  for (int64_t k = 0; k < x.steps * kTileStep; k += kTileStep) {
    for (int64_t m = 0; m < rows; ++m) {
      const float* from = op.x + (first + m) * op.depth + k;
      const Floats a = _mm512_maskz_loadu_ps(first_lanes(op.depth - k), from), b = _mm512_maskz_loadu_ps(first_lanes(op.depth - k - 16), from + 16);
      __m512i parts[kRowParts];
      split(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b), parts);
      for (int p = 0; p < kRowParts; ++p) _mm512_store_si512(by_row[p] + m * kTile, parts[p]);
    }
    for (int p = 0; p < kRowParts; ++p, to += kTile * x.columns) {
      if (x.columns == 1) {
        std::memcpy(to, by_row[p], sizeof(float) * kTile);
        continue;
      }
      for (int64_t i = 0; i < kTile; i += 4) {
        const FourRows four = transposed(by_row[p] + i, kTile);
        for (int64_t j = 0; j < 4; ++j) _mm512_mask_storeu_ps(to + (i + j) * x.columns, first_lanes(x.columns), four.row[j]);
      }
    }
  }
}

void tiled_columns(const Linear& op, const SplitRows& x, int64_t first, int64_t last, float* sums) {
  const int64_t tiles = (last - first + kTile - 1) / kTile, groups = x.groups(op.rows), tile_floats = kTile * x.columns;
  char* copies = reinterpret_cast<char*>(sums + tile_sums(op.rows, last - first));
  TileConfig config;
  for (int i = 0; i < 7; ++i) config.row_bytes[i] = static_cast<uint16_t>(x.columns * 4);
  _tile_loadconfig(&config);
  for (int64_t step = 0; step < x.steps; step += kChunkSteps) {
    const int64_t steps = x.steps - step < kChunkSteps ? x.steps - step : kChunkSteps, k = step * kTileStep, stride = op.depth * 2;
    const bool whole = first + tiles * kTile <= op.weight.width && k + steps * kTileStep <= op.depth;
    // Rows of a power of two compete for the same lines of a cache: what is read often had better lie together.
    const Channels all = whole && groups <= kDirectGroups ? Channels{static_cast<const char*>(op.weight.data) + first * stride + k * 2, stride, 64, stride * kTile}
                               : copy_channels(op, first, tiles, k, steps, copies);
    for (int64_t group = 0; group < groups; ++group) {
      in_blocks<kBlockTiles>(0, tiles, [&](auto count, int64_t tile) {
        Channels w = all;
        w.data += tile * w.tile_stride;
        multiply_chunk<count.value>(w, x.step(group, step), steps, x.columns, step == 0, sums + (group * tiles + tile) * tile_floats);
      });
    }
  }
  _tile_release();
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t tile = 0; tile < tiles; ++tile)
      write_tile(op, first + tile * kTile, last, group * x.columns, x.columns, sums + (group * tiles + tile) * tile_floats);
}

}  // namespace qwenrt::QWENRT_ISA

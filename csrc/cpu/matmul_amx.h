// The same products for 16 tokens at a time on AMX tiles. Their sums are integers too, so results equal those
// of matmul_body.h bit by bit.
#pragma once

#include "cpu/packed_types.h"

namespace ringlm::cpu {
namespace {

constexpr int kTileTokens = 16;

// Tiles, which the intrinsics want as literal numbers:
//   0, 1 and 2, 3   sums of the high and the low digits, [16 tokens, 16 rows] int32: two sets
//   4, 5            high and low digits, [16 tokens, columns] int8
//   6               codes, [columns / 4, 16 rows, 4] uint8

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// GCC 12 does not know that tile instructions read memory: before them, what was written has to be there.
inline void before_tiles() { asm volatile("" : : : "memory"); }

inline void load_config(const TileConfig& c) {
  asm volatile("" : : "r"(&c) : "memory");
  _tile_loadconfig(&c);
}

// words: columns / 4 of a product.
inline void configure_tiles(int words) {
  TileConfig c;
  for (int t = 0; t < 7; ++t) {
    c.row_bytes[t] = static_cast<std::uint16_t>(t == 4 || t == 5 ? 4 * words : 4 * kGroup);
    c.rows[t] = static_cast<std::uint8_t>(t == 6 ? words : kTileTokens);
  }
  load_config(c);
}

struct alignas(64) TileSums {
  std::int32_t high[kTileTokens][kGroup], low[kTileTokens][kGroup];
};

// One staged group times 16 tokens. Two sets of sums, so that the tiles work on one product while the vectors
// scale the one before.
template <int Scales, bool Minima>
void amx_sums(const StagedBlock* block, std::int32_t cols, std::int32_t zero, const ActBlock* x,
              std::int64_t stride, f32x16 (&acc)[kTileTokens]) {
  constexpr int words = 8 / Scales;
  const auto between = static_cast<std::size_t>(stride) * sizeof(ActBlock);
  TileSums sums[2];
  const auto multiply = [&](auto set, auto s, const StagedBlock& b, const ActBlock& first) {
    before_tiles();
    _tile_loadd(6, b.codes[words * s.value], 4 * kGroup);
    _tile_loadd(4, first.digits + words * s.value, between);
    _tile_loadd(5, first.digits + 8 + words * s.value, between);
    if constexpr (set.value == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 5, 6);
      _tile_stored(0, sums[0].high, 4 * kGroup);
      _tile_stored(1, sums[0].low, 4 * kGroup);
    } else {
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbsud(2, 4, 6);
      _tile_dpbsud(3, 5, 6);
      _tile_stored(2, sums[1].high, 4 * kGroup);
      _tile_stored(3, sums[1].low, 4 * kGroup);
    }
  };
  const auto scale = [&](auto set, auto s, const StagedBlock& b, const ActBlock* xb) {
    const f32x16 d = load(b.scales[s.value]), m = load(b.minima[s.value]);
    unrolled<kTileTokens>([&](auto t) {
      const ActBlock& xt = xb[t.value * stride];
      const i32x16 high{_mm512_load_si512(sums[set.value].high[t.value])};
      const i32x16 low{_mm512_load_si512(sums[set.value].low[t.value])};
      i32x16 sum = times_256(high) + low;
      if constexpr (!Minima) sum = sum + set1_i32(-zero * total_of<Scales, s.value>(xt));
      acc[t.value] = fma(d * set1(xt.scale), to_f32(sum), acc[t.value]);
      if constexpr (Minima) acc[t.value] = fma(m, sum_of<Scales, s.value>(xt), acc[t.value]);
    });
  };
  // Product number n goes to set n % 2; a block has one or two products.
  const std::int32_t n = cols / kActBlock;
  if constexpr (Scales == 2) {
    for (std::int32_t i = 0; i < n; ++i) {
      multiply(Constant<0>{}, Constant<0>{}, block[i], x[i]);
      multiply(Constant<1>{}, Constant<1>{}, block[i], x[i]);
      scale(Constant<0>{}, Constant<0>{}, block[i], x + i);
      scale(Constant<1>{}, Constant<1>{}, block[i], x + i);
    }
  } else {
    std::int32_t i = 0;
    for (; i + 2 <= n; i += 2) {
      multiply(Constant<0>{}, Constant<0>{}, block[i], x[i]);
      multiply(Constant<1>{}, Constant<0>{}, block[i + 1], x[i + 1]);
      scale(Constant<0>{}, Constant<0>{}, block[i], x + i);
      scale(Constant<1>{}, Constant<0>{}, block[i + 1], x + i + 1);
    }
    if (i < n) {
      multiply(Constant<0>{}, Constant<0>{}, block[i], x[i]);
      scale(Constant<0>{}, Constant<0>{}, block[i], x + i);
    }
  }
}

// Whole tiles of tokens; returns how many tokens that are.
template <int Scales, bool Minima>
std::int32_t amx_tokens(const MatmulArgs& a, std::int32_t group, const StagedBlock* staged,
                        std::int32_t zero) {
  const std::int32_t n = a.n_tokens / kTileTokens * kTileTokens;
  if (n == 0) return 0;
  configure_tiles(8 / Scales);
  const std::int64_t stride = a.w.cols / kActBlock;
  for (std::int32_t token = 0; token < n; token += kTileTokens) {
    f32x16 acc[kTileTokens];
    for (f32x16& sum : acc) sum = set1(0.0f);
    amx_sums<Scales, Minima>(staged, a.w.cols, zero, a.quantized + token * stride, stride, acc);
    for (int t = 0; t < kTileTokens; ++t) write_group(a, group, token + t, acc[t]);
  }
  _tile_release();
  return n;
}

}  // namespace
}  // namespace ringlm::cpu

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

// words: columns / 4 of a product.
inline void configure_tiles(int words) {
  TileConfig c;
  for (int t = 0; t < 7; ++t) {
    c.row_bytes[t] = static_cast<std::uint16_t>(t == 4 || t == 5 ? 4 * words : 4 * kGroup);
    c.rows[t] = static_cast<std::uint8_t>(t == 6 ? words : kTileTokens);
  }
  _tile_loadconfig(&c);
}

struct alignas(64) TileSums {
  std::int32_t high[kTileTokens][kGroup], low[kTileTokens][kGroup];
};

// Scales the sums over columns of scale S of group G and adds them to acc.
template <class W, int G, int S>
inline __attribute__((always_inline)) void add_sums(const TileSums& sums, const std::uint8_t* p,
                                                    const ActBlock* x, std::int64_t stride,
                                                    f32x16 (&acc)[kTileTokens]) {
  const f32x16 d = W::template scale<G, S>(p);
  f32x16 m = d;
  if constexpr (W::kMinima) m = W::template minimum<G, S>(p);
  unrolled<kTileTokens>([&](auto t) {
    const ActBlock& xt = x[t.value * stride];
    const std::int32_t all = W::kScales == 1 ? xt.totals[0] + xt.totals[1] : xt.totals[S];
    const i32x16 high{_mm512_load_si512(sums.high[t.value])}, low{_mm512_load_si512(sums.low[t.value])};
    i32x16 sum = times_256(high) + low;
    if constexpr (W::kZero != 0) sum = sum + set1_i32(-W::kZero * all);
    acc[t.value] = fma(d * set1(xt.scale), to_f32(sum), acc[t.value]);
    if constexpr (W::kMinima) {
      acc[t.value] = fma(m, set1(W::kScales == 1 ? xt.sum : xt.half_sums[S]), acc[t.value]);
    }
  });
}

// One group of rows times 16 tokens. Two sets of sums, so that the tiles work on one product while the
// vectors scale the one before.
template <class W>
void amx_group(const std::uint8_t* p, std::int32_t cols, const ActBlock* x, std::int64_t stride,
               f32x16 (&acc)[kTileTokens]) {
  constexpr int bytes = kGroup * W::kBytes, groups = W::kColumns / kActBlock, words = 8 / W::kScales;
  alignas(64) std::uint8_t codes[2][words][4 * kGroup];
  TileSums sums[2];
  for (std::int32_t i = 0; i < cols; i += W::kColumns, p += bytes, x += groups) {
    unrolled<groups>([&](auto g) {
      unrolled<W::kScales>([&](auto s) {
        constexpr int G = decltype(g)::value, S = decltype(s)::value, set = (G * W::kScales + S) % 2;
        unrolled<words>(
            [&](auto w) { store_words(codes[set][w.value], W::template codes<G, words * S + w.value>(p)); });
        const ActBlock& first = x[G];
        const auto bytes_between = static_cast<std::size_t>(stride) * sizeof(ActBlock);
        _tile_loadd(6, codes[set], 4 * kGroup);
        _tile_loadd(4, first.digits + words * S, bytes_between);
        _tile_loadd(5, first.digits + 8 + words * S, bytes_between);
        if constexpr (set == 0) {
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
        add_sums<W, G, S>(sums[set], p, x + G, stride, acc);
      });
    });
  }
}

// Whole tiles of tokens; returns how many tokens that are.
template <class W>
std::int32_t amx_tokens(const MatmulArgs& a, std::int32_t begin, std::int32_t end) {
  const std::int32_t n = a.n_tokens / kTileTokens * kTileTokens;
  if (n == 0) return 0;
  configure_tiles(8 / W::kScales);
  const std::int64_t stride = a.w.cols / kActBlock;
  for (std::int32_t token = 0; token < n; token += kTileTokens) {
    for (std::int32_t group = begin; group < end; ++group) {
      f32x16 acc[kTileTokens];
      for (f32x16& sum : acc) sum = set1(0.0f);
      amx_group<W>(a.w.data + static_cast<std::size_t>(group) * a.w.group_bytes(), a.w.cols,
                   a.quantized + token * stride, stride, acc);
      for (int t = 0; t < kTileTokens; ++t) write_group(a, group, token + t, acc[t]);
    }
  }
  _tile_release();
  return n;
}

}  // namespace
}  // namespace ringlm::cpu

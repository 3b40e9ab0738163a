// The same products for 16 tokens at a time on AMX tiles. Their sums are integers too, so results equal those
// of matmul_body.h bit by bit.
#pragma once

#include "cpu/packed_types.h"

namespace ringlm::cpu {
namespace {

// Tiles, which the intrinsics want as literal numbers:
//   0, 1   sums of the high and the low digits, [16 tokens, 16 rows] int32
//   4, 5   high and low digits, [16 tokens, columns] int8
//   6      codes, [columns / 4, 16 rows, 4] int8

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
  for (const int t : {0, 1, 4, 5, 6}) {
    c.row_bytes[t] = static_cast<std::uint16_t>(t == 4 || t == 5 ? 4 * words : 4 * kGroup);
    c.rows[t] = static_cast<std::uint8_t>(t == 6 ? words : kActTile);
  }
  load_config(c);
}

struct alignas(64) TileSums {
  std::int32_t high[kActTile][kGroup], low[kActTile][kGroup];
};

// One staged group times a tile of tokens. A block is one product, or one for each of its scales. Scaling the
// product before is mixed with the tile instructions: behind them it would be too far away to run beside
// them.
template <int Scales, bool Minima>
void amx_sums(const StagedBlock* block, std::int32_t cols, Tile x, f32x16 (&acc)[kActTile]) {
  unrolled<kActTile>([&](auto t) { acc[t.value] = set1(0.0f); });
  constexpr int words = 8 / Scales;
  const std::int32_t products = cols / kActBlock * Scales;
  TileSums sums[2];
  const auto scale = [&](std::int32_t n, auto quarter) {
    const StagedBlock& b = block[n / Scales];
    const ActSums* numbers = x.block(n / Scales).sums();
    const TileSums& from = sums[n % 2];
    const std::int32_t s = n % Scales;
    const f32x16 d = load(b.scales[s]), m = load(b.minima[s]);
    unrolled<kActTile / 4>([&](auto i) {
      constexpr int t = quarter.value * kActTile / 4 + i.value;
      const i32x16 high{_mm512_load_si512(from.high[t])}, low{_mm512_load_si512(from.low[t])};
      acc[t] = fma(d * set1(numbers[t].scale), to_f32(times_256(high) + low), acc[t]);
      if constexpr (Minima)
        acc[t] = fma(m, set1(Scales == 1 ? numbers[t].sum : numbers[t].half_sums[s]), acc[t]);
    });
  };
  const auto step = [&](std::int32_t n, auto between) {
    const std::int32_t* digits = x.block(n / Scales).digits()->words + words * (n % Scales);
    TileSums& to = sums[n % 2];
    before_tiles();
    _tile_loadd(6, block[n / Scales].codes[words * (n % Scales)], 4 * kGroup);
    _tile_loadd(4, digits, sizeof(ActDigits));
    _tile_loadd(5, digits + 8, sizeof(ActDigits));
    _tile_zero(0);
    _tile_zero(1);
    between(Constant<0>{});
    _tile_dpbssd(0, 4, 6);
    between(Constant<1>{});
    _tile_dpbssd(1, 5, 6);
    between(Constant<2>{});
    _tile_stored(0, to.high, 4 * kGroup);
    between(Constant<3>{});
    _tile_stored(1, to.low, 4 * kGroup);
  };
  step(0, [](auto) {});
  for (std::int32_t n = 1; n < products; ++n) step(n, [&](auto quarter) { scale(n - 1, quarter); });
  unrolled<4>([&](auto quarter) { scale(products - 1, quarter); });
}

template <int Scales, bool Minima>
void amx_tokens(const MatmulArgs& a, std::int32_t group, const StagedBlock* staged) {
  configure_tiles(8 / Scales);
  for (std::int32_t token = 0; token < a.n_tokens; token += kActTile) {
    f32x16 acc[kActTile];
    amx_sums<Scales, Minima>(staged, a.w.cols, tile_of(a.quantized, a.w.cols, token, a.n_tokens), acc);
    const std::int32_t n = a.n_tokens - token;
    for (int t = 0; t < kActTile && t < n; ++t) write_group(a, group, token + t, acc[t]);
  }
  _tile_release();
}

}  // namespace
}  // namespace ringlm::cpu

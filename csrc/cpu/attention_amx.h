// Products of digits and words on AMX tiles, for attention_body.h. They are sums of integers, so they equal
// those of dot4().
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul_body.h"

namespace ringlm::cpu {
namespace {

// Products of digits in three planes, [3, n] rows of bytes, with words. Up to 16 rows of a plane are a block;
// where n is small all planes together fit a tile. Tiles:
//   together   0 to 3: sums of four vectors of words   4: digits        5 to 7: words
//   else       0 to 2: sums of the planes              3 to 5: digits   6: words
class DigitTiles {
 public:
  explicit DigitTiles(std::int32_t n) : n_(n), together_(3 * n <= kMostRows) {
    const std::int32_t blocks = (n + kMostRows - 1) / kMostRows;
    rows_ = (n + blocks - 1) / blocks;
  }

  void configure() const {
    TileConfig c;
    for (int t = 0; t < 8; ++t) {
      const bool words = t >= (together_ ? 5 : 6);
      c.row_bytes[t] = 64;
      c.rows[t] = static_cast<std::uint8_t>(words ? 16 : together_ ? 3 * n_ : rows_);
    }
    load_config(c);
  }

  // Rows of a block. The last one ends at n, and may overlap the one before.
  std::int32_t rows() const { return rows_; }
  std::int32_t block(std::int32_t first) const { return first + rows_ <= n_ ? first : n_ - rows_; }

  // The sums of one vector of words.
  struct alignas(64) Products {
    std::int32_t of[3 * 16][16];
    std::int32_t planes;  // rows between two planes
    i32x16 operator()(int plane, std::int32_t row) const {
      return {_mm512_load_si512(of[plane * planes + row])};
    }
  };

  // The block of digits at `digits`, rows `stride` bytes apart, times `count` (up to four) vectors of words
  // that lie one beside the other in rows of `words_stride` bytes. Of both there are `chunks`: 64 bytes of
  // digits against 16 rows of words.
  template <bool kSignedDigits>
  void multiply(const std::uint8_t* digits, std::int64_t stride, const std::uint8_t* words,
                std::int64_t words_stride, std::int32_t chunks, std::int32_t count, Products* out) const {
    const auto rows = static_cast<std::size_t>(stride), between = static_cast<std::size_t>(words_stride);
    const std::int64_t chunk = 16 * words_stride, plane = n_ * stride;
    before_tiles();
    if (together_) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (std::int32_t c = 0; c < chunks; ++c, digits += 64, words += chunk) {
        _tile_loadd(4, digits, rows);
        _tile_loadd(5, words, between);
        dot<kSignedDigits, 0>();
        if (count > 1) _tile_loadd(6, words + 64, between);
        if (count > 1) dot<kSignedDigits, 1>();
        if (count > 2) _tile_loadd(7, words + 128, between);
        if (count > 2) dot<kSignedDigits, 2>();
        if (count > 3) _tile_loadd(5, words + 192, between);
        if (count > 3) dot<kSignedDigits, 3>();
      }
      _tile_stored(0, out[0].of, 64);
      if (count > 1) _tile_stored(1, out[1].of, 64);
      if (count > 2) _tile_stored(2, out[2].of, 64);
      if (count > 3) _tile_stored(3, out[3].of, 64);
      for (std::int32_t v = 0; v < count; ++v) out[v].planes = n_;
      return;
    }
    for (std::int32_t v = 0; v < count; ++v, words += 64, ++out) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      for (std::int32_t c = 0; c < chunks; ++c) {
        const std::uint8_t* at = digits + 64 * c;
        if (v == 0 || chunks > 1) {
          _tile_loadd(3, at, rows);
          _tile_loadd(4, at + plane, rows);
          _tile_loadd(5, at + 2 * plane, rows);
        }
        _tile_loadd(6, words + c * chunk, between);
        if constexpr (kSignedDigits) {
          _tile_dpbsud(0, 3, 6);
          _tile_dpbsud(1, 4, 6);
          _tile_dpbsud(2, 5, 6);
        } else {
          _tile_dpbusd(0, 3, 6);
          _tile_dpbusd(1, 4, 6);
          _tile_dpbusd(2, 5, 6);
        }
      }
      _tile_stored(0, out->of[0], 64);
      _tile_stored(1, out->of[16], 64);
      _tile_stored(2, out->of[32], 64);
      out->planes = 16;
    }
  }

 private:
  static constexpr std::int32_t kMostRows = 16;

  // Of vector V, digits in tile 4. (The intrinsics want literal numbers.)
  template <bool kSignedDigits, int V>
  static void dot() {
    if constexpr (kSignedDigits) {
      if constexpr (V == 0) _tile_dpbsud(0, 4, 5);
      if constexpr (V == 1) _tile_dpbsud(1, 4, 6);
      if constexpr (V == 2) _tile_dpbsud(2, 4, 7);
      if constexpr (V == 3) _tile_dpbsud(3, 4, 5);
    } else {
      if constexpr (V == 0) _tile_dpbusd(0, 4, 5);
      if constexpr (V == 1) _tile_dpbusd(1, 4, 6);
      if constexpr (V == 2) _tile_dpbusd(2, 4, 7);
      if constexpr (V == 3) _tile_dpbusd(3, 4, 5);
    }
  }

  std::int32_t n_, rows_;
  bool together_;
};

}  // namespace
}  // namespace ringlm::cpu

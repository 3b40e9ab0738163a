// Products of digits and words on AMX tiles, for attention_body.h. They are sums of integers, so they equal
// those of dot4().
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul_body.h"

namespace ringlm::cpu {
namespace {

// Digits of n rows in three planes, [3, n] rows of bytes that lie `stride` bytes apart. Up to 16 rows make a
// tile; where few are all planes do together.
class DigitTiles {
 public:
  DigitTiles(const std::uint8_t* digits, std::int64_t stride, std::int32_t n)
      : digits_(digits), stride_(stride), n_(n), together_(3 * n <= kMostRows) {
    const std::int32_t blocks = (n + kMostRows - 1) / kMostRows;
    rows_ = (n + blocks - 1) / blocks;
    TileConfig c;
    for (int t = 0; t < 8; ++t) {
      c.row_bytes[t] = 64;
      c.rows[t] = static_cast<std::uint8_t>(t == kWords ? 16 : together_ ? 3 * n : rows_);
    }
    _tile_loadconfig(&c);
  }

  // Rows of a block. The last one ends at n, and may overlap the one before.
  std::int32_t rows() const { return rows_; }
  std::int32_t block(std::int32_t first) const { return first + rows_ <= n_ ? first : n_ - rows_; }

  struct alignas(64) Products {
    std::int32_t of[3 * 16][16];
    std::int32_t planes;  // rows between two planes
    i32x16 operator()(int plane, std::int32_t row) const {
      return {_mm512_load_si512(of[plane * planes + row])};
    }
  };

  // Chunk c of the block at `first`: bytes [64 c, 64 c + 64) of its rows.
  void load_digits(std::int32_t first, std::int32_t c) const {
    const std::uint8_t* at = digits_ + first * stride_ + 64 * c;
    const std::int64_t plane = n_ * stride_;
    const auto stride = static_cast<std::size_t>(stride_);
    _tile_loadd(4, at, stride);
    if (together_) return;
    _tile_loadd(5, at + plane, stride);
    _tile_loadd(6, at + 2 * plane, stride);
  }
  void clear() const {
    _tile_zero(0);
    if (together_) return;
    _tile_zero(1);
    _tile_zero(2);
  }
  // Sixteen lanes of sixteen words, one row of words `stride` bytes behind the other.
  template <bool kSignedDigits>
  void multiply(const std::uint8_t* words, std::size_t stride) const {
    _tile_loadd(7, words, stride);
    if constexpr (kSignedDigits) {
      _tile_dpbsud(0, 4, 7);
      if (together_) return;
      _tile_dpbsud(1, 5, 7);
      _tile_dpbsud(2, 6, 7);
    } else {
      _tile_dpbusd(0, 4, 7);
      if (together_) return;
      _tile_dpbusd(1, 5, 7);
      _tile_dpbusd(2, 6, 7);
    }
  }
  void store(Products& p) const {
    p.planes = together_ ? n_ : 16;
    _tile_stored(0, p.of[0], 64);
    if (together_) return;
    _tile_stored(1, p.of[16], 64);
    _tile_stored(2, p.of[32], 64);
  }

 private:
  static constexpr std::int32_t kMostRows = 16;
  static constexpr int kWords = 7;  // 0 to 2: sums of the planes; 4 to 6: their digits

  const std::uint8_t* digits_;
  std::int64_t stride_;
  std::int32_t n_, rows_;
  bool together_;
};

}  // namespace
}  // namespace ringlm::cpu

// Rows of activations quantized in plain code, as a kernel is given them or leaves them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/launch.h"
#include "simt/simt.h"

namespace quantized {

using ringlm::cuda::blocks_of;
using ringlm::cuda::kBlock;
using ringlm::cuda::Quantized;

inline std::vector<float> random_floats(std::size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& v : values) v = normal(random);
  return values;
}

// Device memory of M rows, of exact size.
struct Rows {
  int M, cols;
  simt::Buffer<std::int8_t> digits;
  simt::Buffer<float4> scales;
  simt::Buffer<float> squares;

  Rows(const char* name, int M_, int cols_)
      : M(M_),
        cols(cols_),
        digits(std::string(name) + " digits", Quantized::digit_bytes(cols, M)),
        scales(std::string(name) + " scales", Quantized::scale_bytes(cols, M) / sizeof(float4)),
        squares(std::string(name) + " squares", Quantized::square_bytes(cols, M) / sizeof(float)) {}

  Quantized of(bool with_squares) {
    return {digits.data(), scales.data(), with_squares ? squares.data() : nullptr, cols};
  }
  // Row m by itself.
  Quantized row(int m, bool with_squares) {
    const std::size_t at = static_cast<std::size_t>(m * blocks_of(cols));
    return {digits.data() + 64 * at, scales.data() + at, with_squares ? squares.data() + at : nullptr, cols};
  }

  std::int8_t& digit(int m, int piece, int column) {
    const int blocks = blocks_of(cols), c = column % kBlock;
    return digits[static_cast<std::size_t>(((m * 4 + 2 * piece + c / 16) * blocks + column / kBlock) * 16 +
                                           c % 16)];
  }
  int code(int m, int column) { return digit(m, 0, column) * 256 + digit(m, 1, column); }
  float4& scale(int m, int block) { return scales[static_cast<std::size_t>(m * blocks_of(cols) + block)]; }
  float& square(int m, int block) { return squares[static_cast<std::size_t>(m * blocks_of(cols) + block)]; }
  double value(int m, int column) {
    return static_cast<double>(scale(m, column / kBlock).x) * code(m, column);
  }

  // x [M, cols]; squares are those of `before` the norm's weight.
  void fill(const std::vector<float>& x, const std::vector<float>& before) {
    for (int m = 0; m < M; ++m) {
      for (int b = 0; b < blocks_of(cols); ++b) {
        float in[kBlock] = {}, largest = 0, square_sum = 0;
        for (int c = 0; c < std::min(kBlock, cols - kBlock * b); ++c) {
          const auto at = static_cast<std::size_t>(m * cols + kBlock * b + c);
          in[c] = x[at];
          largest = std::max(largest, std::abs(in[c]));
          square_sum += before[at] * before[at];
        }
        const float step = largest / 32639.0f;
        int sums[2] = {};
        for (int c = 0; c < kBlock; ++c) {
          const int code = largest > 0 ? static_cast<int>(std::nearbyint(in[c] / step)) : 0;
          const int high = (code + 128) >> 8;
          digit(m, 0, kBlock * b + c) = static_cast<std::int8_t>(high);
          digit(m, 1, kBlock * b + c) = static_cast<std::int8_t>(code - 256 * high);
          sums[c / 16] += code;
        }
        scale(m, b) = {step, step * static_cast<float>(sums[0]), step * static_cast<float>(sums[1]),
                       step * static_cast<float>(sums[0] + sums[1])};
        square(m, b) = square_sum;
      }
    }
  }
};

}  // namespace quantized

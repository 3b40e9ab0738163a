// The kernels of norm.h against float64, and quantized rows against the CPU's, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/kernels.h"
#include "cuda/launch.h"
#include "cuda/port.h"
#include "simt/helpers.h"

using namespace ringlm;
using namespace ringlm::cuda;
using simt::Buffer;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = HUGE_VALF;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> random_floats(std::int64_t n, unsigned seed, float around = 0.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(around);
  std::vector<float> values(size(n));
  for (float& v : values) v = normal(random);
  return values;
}

bool same_bits(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

void check_no_bypass() {
  CHECK(simt::report().bypasses == 0);
  CHECK(simt::report().bypass_lines == std::vector<std::string>{});
}

// The memory of Quantized.
struct QuantizedRows {
  int M, cols, blocks = blocks_of(cols);
  Buffer<std::int8_t> digits;
  Buffer<float4> scales;
  Buffer<float> squares;

  QuantizedRows(int M_, int cols_)
      : M(M_),
        cols(cols_),
        digits("digits", Quantized::digit_bytes(cols, M)),
        scales("scales", Quantized::scale_bytes(cols, M) / 16),
        squares("squares", Quantized::square_bytes(cols, M) / 4) {}
  Quantized view(bool with_squares) {
    return {digits.data(), scales.data(), with_squares ? squares.data() : nullptr, cols};
  }
  int code(int m, int column) {
    const auto digit = [&](int piece) {
      return int{digits[size(((m * 4 + piece) * blocks + column / 32) * 16 + column % 16)]};
    };
    return 256 * digit(column % 32 / 16) + digit(2 + column % 32 / 16);
  }
  float4 scale(int m, int block) { return scales[size(m * blocks + block)]; }
};

// Row m is `value` quantized in blocks of 32, as the CPU has it.
void check_row(QuantizedRows& q, int m, std::vector<float> value) {
  value.resize(size(q.blocks * 32), 0.0f);
  const auto n = static_cast<std::int32_t>(value.size());
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> cpu_row(cpu::act_bytes(n, 1) / 64 + 1);
  cpu::kernels().quantize(value.data(), n, cpu_row[0].bytes, 0, 1);
  for (int block = 0; block < q.blocks; ++block) {
    cpu::ActSums sums;
    std::memcpy(&sums, cpu_row[0].bytes + size(block) * cpu::kActBytes + sizeof(cpu::ActDigits), sizeof sums);
    const float4 scale = q.scale(m, block);
    const auto first = value.begin() + 32 * block;
    if (!std::all_of(first, first + 32, [](float v) { return std::isfinite(v); })) {
      for (const float v : {scale.x, scale.y, scale.z, scale.w}) CHECK(std::isnan(v));
      continue;
    }
    CHECK(same_bits(scale.x, sums.scale));
    CHECK(same_bits(scale.y, sums.half_sums[0]));
    CHECK(same_bits(scale.z, sums.half_sums[1]));
    CHECK(same_bits(scale.w, sums.sum));
    float largest = 0.0f;
    for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(first[i]));
    const float inverse = largest < 1e-30f ? 0.0f : cpu::kActLargest / largest;
    int wrong = 0;
    for (int i = 0; i < 32; ++i) {
      wrong += q.code(m, 32 * block + i) != static_cast<int>(std::nearbyint(first[i] * inverse)) ? 1 : 0;
    }
    CHECK(wrong == 0);
  }
}

// squares[m] of x, and that their sum is that of the row to 1e-6.
void check_squares(QuantizedRows& q, int m, const float* x) {
  constexpr double kUnderflow = 1e-44;  // of a square in float32
  double all = 0.0, sum = 0.0;
  for (int block = 0; block < q.blocks; ++block) {
    double of_block = 0.0;
    for (int i = 32 * block; i < std::min(32 * (block + 1), q.cols); ++i) of_block += double{x[i]} * x[i];
    const float square = q.squares[size(m * q.blocks + block)];
    CHECK(std::fabs(square - of_block) <= 1e-6 * of_block + kUnderflow);
    all += of_block, sum += square;
  }
  CHECK(std::fabs(sum - all) <= 1e-6 * all + kUnderflow);
}

double root_mean_square(const float* x, int n, float eps) {
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  return std::sqrt(sum / n + double{eps});
}

}  // namespace

TEST_CASE("to_quantized has the codes of the CPU and the squares before the weight") {
  for (const int cols : {32, 1024 + 12}) {
    CAPTURE(cols);
    constexpr int kRows = 4;
    std::vector<float> x = random_floats(kRows * cols, 1);
    const std::vector<float> norm = random_floats(cols, 2, 1.0f);
    for (int i = 0; i < 32; ++i) x[size(i)] = 1e-31f * static_cast<float>(i);  // below what counts
    for (int i = 0; i < 32; ++i) x[size(cols + i)] = 0.0f;
    for (int i = 0; i < 32; ++i) x[size(2 * cols + i)] *= 1e30f;  // their squares are infinite
    const std::vector<std::int32_t> index = {3, 0, 2, 1, 1};
    simt::in_every_order([&] {
      Buffer<float> from("x", x), weight("norm", norm);
      Buffer<std::int32_t> rows("index", index);
      QuantizedRows by_index(5, cols), plain(kRows, cols);
      to_quantized({from.data(), rows.data(), 5, cols, weight.data(), 1e-5f}, by_index.view(true), nullptr);
      to_quantized({from.data(), nullptr, kRows, cols, nullptr, 0.0f}, plain.view(false), nullptr);
      for (int m = 0; m < 5; ++m) {
        const float* const row = &x[size(index[size(m)] * cols)];
        std::vector<float> weighted(row, row + cols);
        for (int i = 0; i < cols; ++i) weighted[size(i)] *= norm[size(i)];
        check_row(by_index, m, weighted);
        if (index[size(m)] != 2) check_squares(by_index, m, row);
      }
      CHECK(std::isinf(by_index.squares[size(2 * by_index.blocks)]));
      for (int m = 0; m < kRows; ++m) check_row(plain, m, {&x[size(m * cols)], &x[size(m * cols)] + cols});
      check_no_bypass();
    });
  }
}

TEST_CASE("to_quantized: what is no number stays none") {
  std::vector<float> x = random_floats(96, 3);
  x[40] = kNaN;
  x[70] = -kInf;
  Buffer<float> from("x", x);
  QuantizedRows q(1, 96);
  to_quantized({from.data(), nullptr, 1, 96, nullptr, 0.0f}, q.view(true), nullptr);
  check_row(q, 0, x);
  CHECK(std::isfinite(q.scale(0, 0).x));
  CHECK(std::isnan(q.squares[1]));
  CHECK(std::isinf(q.squares[2]));
}

TEST_CASE("to_halves") {
  for (const int cols : {100, 1600}) {
    CAPTURE(cols);
    constexpr int kRows = 6;
    std::vector<float> x = random_floats(kRows * cols, 4);
    const std::vector<float> norm = random_floats(cols, 5, 1.0f);
    const float sizes[kRows] = {1.0f, 1e-12f, 1e12f, 0.0f, 1.0f, 1.0f};
    for (int i = 0; i < kRows * cols; ++i) x[size(i)] *= sizes[i / cols];
    x[size(4 * cols + 7)] = kNaN;
    x[size(5 * cols + 9)] = kInf;
    simt::in_every_order([&] {
      for (const bool with_norm : {true, false}) {
        Buffer<float> from("x", x), weight("norm", norm), steps("steps", kRows);
        Buffer<half> halves("halves", size(kRows * blocks_of(cols) * 32));
        const Halves to{halves.data(), steps.data(), cols};
        to_halves({from.data(), nullptr, kRows, cols, with_norm ? weight.data() : nullptr, 1e-6f}, to,
                  nullptr);
        for (int m = 0; m < kRows; ++m) {
          CAPTURE(m);
          const auto value = [&](int i) {
            return double{__half2float(halves[size(m * to.stride() + i)])} * steps[size(m)];
          };
          if (m >= 4) {
            CHECK(std::isnan(value(0)));
            continue;
          }
          const float* const row = &x[size(m * cols)];
          const double rms = with_norm ? root_mean_square(row, cols, 1e-6f) : 1.0;
          double largest = 0.0, worst = 0.0, most = 0.0;
          for (int i = 0; i < cols; ++i) {
            const double expected = row[i] / rms * (with_norm ? norm[size(i)] : 1.0f);
            largest = std::max(largest, std::fabs(expected));
            most = simt::larger(most, std::fabs(double{__half2float(halves[size(m * to.stride() + i)])}));
            // Half an ulp of f16, or of its subnormals, and what float32 adds.
            const double allowed =
                std::max(0x1p-11 * 1.002 * std::fabs(expected), 0x1p-25 * 1.002 * steps[size(m)]);
            worst = simt::larger(worst, std::fabs(value(i) - expected) / allowed);
          }
          CHECK(worst <= 1.0);
          int exponent = 0;
          CHECK(std::frexp(steps[size(m)], &exponent) == 0.5f);
          CHECK(most <= 16384.0);
          CHECK((largest == 0.0 || most >= 8191.0));
          for (int i = cols; i < to.stride(); ++i) CHECK(same_bits(static_cast<float>(value(i)), 0.0f));
        }
      }
      check_no_bypass();
    });
  }
}

TEST_CASE("add_normed") {
  for (const int cols : {300, 1536}) {
    CAPTURE(cols);
    constexpr int kRows = 3;
    const std::vector<float> x = random_floats(kRows * cols, 6), y = random_floats(kRows * cols, 7, 0.5f);
    const std::vector<float> norm = random_floats(cols, 8, 1.0f), next_norm = random_floats(cols, 9, 1.0f);
    for (const int which : {0, 1, 2, 3}) {
      CAPTURE(which);
      simt::in_every_order([&] {
        const bool has_norm = which % 2 == 0, has_next = which < 3, has_next_norm = which < 2;
        Buffer<float> to("x", x), from("y", y), weight("norm", norm), next_weight("next_norm", next_norm);
        QuantizedRows next(kRows, cols);
        add_normed({.x = to.data(),
                    .y = from.data(),
                    .norm = has_norm ? weight.data() : nullptr,
                    .scale = 0.7f,
                    .eps = 1e-5f,
                    .M = kRows,
                    .cols = cols,
                    .next_norm = has_next_norm ? next_weight.data() : nullptr,
                    .next = has_next ? next.view(has_next_norm) : Quantized{}},
                   nullptr);
        for (int m = 0; m < kRows; ++m) {
          const double rms = has_norm ? root_mean_square(&y[size(m * cols)], cols, 1e-5f) : 1.0;
          double worst = 0.0;
          std::vector<float> input(size(cols));
          for (int i = 0; i < cols; ++i) {
            const std::size_t at = size(m * cols + i);
            const double expected = x[at] + double{0.7f} * y[at] / rms * (has_norm ? norm[size(i)] : 1.0f);
            worst = simt::larger(worst, std::fabs(to[at] - expected));
            input[size(i)] = has_next_norm ? to[at] * next_norm[size(i)] : to[at];
          }
          CHECK(worst < 3e-6);
          if (has_next) check_row(next, m, input);
          if (has_next_norm) check_squares(next, m, &to[size(m * cols)]);
        }
        check_no_bypass();
      });
    }
  }
}

TEST_CASE("add_normed: what is no number, or has squares beyond float32, makes the row none") {
  for (const float value : {kNaN, kInf, 3e19f}) {
    std::vector<float> y = random_floats(128, 10);
    y[64 + 5] = value;
    Buffer<float> x("x", random_floats(128, 11)), from("y", y), norm("norm", random_floats(64, 12));
    add_normed({x.data(), from.data(), norm.data(), 1.0f, 1e-5f, 2, 64, nullptr, {}}, nullptr);
    CHECK(std::all_of(x.begin(), x.begin() + 64, [](float v) { return std::isfinite(v); }));
    CHECK(std::all_of(x.begin() + 64, x.end(), [](float v) { return std::isnan(v); }));
  }
}

TEST_CASE("gate_up") {
  for (const int n : {64, 333}) {
    std::vector<float> g = random_floats(3 * n, 13), u = random_floats(3 * n, 14);
    for (float& v : g) v *= 4.0f;
    g[0] = 95.0f, g[1] = -95.0f, g[2] = 1e10f, g[3] = kNaN, g[4] = -kInf;
    u[5] = kInf;
    for (const Activation activation : {Activation::Silu, Activation::Gelu}) {
      simt::in_every_order([&] {
        Buffer<float> gate("gate", g), up("up", u);
        gate_up(gate.data(), up.data(), 3, n, activation, nullptr);
        double worst = 0.0;
        for (std::size_t i = 0; i < g.size(); ++i) {
          const double x = g[i], inner = 0.79788456080286536 * (x + 0.044715 * x * x * x);
          const double weight =
              activation == Activation::Silu ? 1.0 / (1.0 + std::exp(-x)) : 0.5 * (1.0 + std::tanh(inner));
          const double expected = x * weight * u[i];
          if (i >= 3 && i <= 5) {
            CHECK_FALSE(std::isfinite(gate[i]));
          } else {
            worst = simt::larger(worst, std::fabs(gate[i] - expected) / (std::fabs(expected) + 1e-6));
          }
        }
        CHECK(worst < 2e-5);  // of a tail, where the exponent is rounded before the power; else 1e-6
        check_no_bypass();
      });
    }
  }
}

TEST_CASE("check_finite") {
  for (const int n : {7, 64, 5000}) {
    CAPTURE(n);
    std::vector<float> x = random_floats(5 * n, 15);
    x[size(n - 1)] = kNaN;
    x[size(n)] = -kInf;
    x[size(2 * n + 3)] = std::numeric_limits<float>::max();
    x[size(3 * n + n / 2)] = kInf;
    simt::in_every_order([&] {
      Buffer<float> from("x", x);
      Buffer<std::uint32_t> bad("bad", std::vector<std::uint32_t>{0, 0, 0, 0, 1});
      check_finite(from.data(), 5, n, bad.data(), nullptr);
      CHECK(std::vector<std::uint32_t>(bad.begin(), bad.end()) == std::vector<std::uint32_t>{1, 1, 0, 1, 1});
      check_no_bypass();
    });
  }
}

// Products of a prefill chunk against the same in double.
#include "cuda/gemm.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "matrices.h"
#include "random_shapes.h"
#include "simt/helpers.h"

using namespace ringlm;
using namespace ringlm::cuda;

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Case {
  gguf::DType type;
  int rows, M, cols;
  bool bias = false, add = false;
};

// Weights are rounded to halves, 2^-11 of each, which adds up like the sum's terms do when they are random:
// errors are held against scale * sqrt(sum of (w x)^2) of a result, and what it is added to and bias count
// too.
constexpr double kTolerance = 1e-3;

struct Problem {
  Case c;
  std::vector<std::uint8_t> file;
  std::vector<float> steps, bias, y;
  std::vector<half> x;  // [M, stride]
  std::vector<double> expected, bound;
  simt::BufferCount of_w{};  // by the last run
  static constexpr float kScale = 0.75f;

  explicit Problem(const Case& c_, unsigned seed) : c(c_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    file = matrices::random_rows(c.type, c.rows, c.cols, random);
    const std::vector<float> w = matrices::numbers(c.type, file);
    const std::size_t stride = size(blocks_of(c.cols) * kBlock), cols = size(c.cols);
    x.assign(size(c.M) * stride, __float2half(0.0f));
    steps.resize(size(c.M));
    for (std::size_t m = 0; m < steps.size(); ++m) {
      steps[m] = std::exp2(static_cast<float>(m % 7) - 4.0f);
      for (std::size_t i = 0; i < cols; ++i) x[m * stride + i] = __float2half(300.0f * normal(random));
    }
    bias.resize(c.bias ? size(c.rows) : 0);
    for (float& b : bias) b = 100.0f * normal(random);
    y.assign(size(c.M) * size(c.rows), std::numeric_limits<float>::quiet_NaN());
    if (c.add) std::generate(y.begin(), y.end(), [&] { return 100.0f * normal(random); });
    expected.resize(y.size());
    bound.resize(y.size());
    for (std::size_t m = 0; m < steps.size(); ++m) {
      for (std::size_t r = 0; r < size(c.rows); ++r) {
        double sum = 0.0, squares = 0.0;
        for (std::size_t i = 0; i < cols; ++i) {
          const double term =
              static_cast<double>(w[r * cols + i]) * __half2float(x[m * stride + i]) * steps[m];
          sum += term;
          squares += term * term;
        }
        const std::size_t at = m * size(c.rows) + r;
        const double b = c.bias ? bias[r] : 0.0, before = c.add ? y[at] : 0.0;
        expected[at] = before + kScale * (sum + b);
        bound[at] =
            kTolerance * kScale * std::sqrt(squares) + 1e-6 * (std::fabs(before) + kScale * std::fabs(b));
      }
    }
  }

  // The largest error in parts of its bound.
  double run() {
    const matrices::Packed packed("w", c.type, c.rows, c.cols, file);
    simt::Buffer<half> x_device("x", x);
    simt::Buffer<float> steps_device("steps", steps), bias_device("bias", bias), y_device("y", y);
    simt::reset_report();
    gemm({packed.matrix,
          {x_device.data(), steps_device.data(), c.cols},
          c.M,
          c.bias ? bias_device.data() : nullptr,
          y_device.data(),
          c.add,
          kScale},
         nullptr);
    CHECK(simt::report().bypasses == 0);
    if (!simt::kHardware) of_w = simt::report().buffer("w");
    double worst = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double error = std::fabs(y_device[i] - expected[i]) / bound[i];
      worst = simt::larger(worst, error);
    }
    return worst;
  }
};

void check(const Case& c, unsigned seed) {
  CAPTURE(std::string(gguf::traits(c.type).name));
  CAPTURE(c.rows);
  CAPTURE(c.M);
  CAPTURE(c.cols);
  CHECK(Problem(c, seed).run() < 1.0);
}

}  // namespace

TEST_CASE("gemm: every type") {
  unsigned seed = 0;
  for (const gguf::DType type : matrices::kTypes) {
    const int unit = static_cast<int>(gguf::traits(type).block_size);
    check({type, 34, 9, unit == 256 ? 256 : 96, true, false}, ++seed);
    check({type, 67, 66, unit == 256 ? 768 : 576, false, true}, ++seed);
    if (unit == 1) check({type, 5, 10, 77, true, true}, ++seed);
  }
}

TEST_CASE("gemm: borders of tiles") {
  unsigned seed = 100;
  for (const int rows : {1, 3, 63, 64, 65, 130}) check({gguf::DType::Q8_0, rows, 17, 64, true, true}, ++seed);
  for (const int M : {1, 16, 63, 64, 65, 130}) check({gguf::DType::Q4_0, 20, M, 32, true, true}, ++seed);
  for (const int cols : {32, 64, 96, 128, 1056}) check({gguf::DType::Q5_1, 20, 9, cols}, ++seed);
}

TEST_CASE("gemm: random shapes") {
  shapes::Choice choice(4);
  for (unsigned i = 0; i < shapes::kMany; ++i) {
    CAPTURE(i);
    const gguf::DType type = choice.one_of(matrices::kTypes);
    const int unit = static_cast<int>(gguf::traits(type).block_size);
    const Case c{type,
                 choice.between(1, 140),
                 choice.between(1, 140),
                 unit * choice.between(1, 600 / unit),
                 choice.once_in(2),
                 choice.once_in(2)};
    simt::in_one_order(i, [&] { check(c, 300 + i); });
  }
}

TEST_CASE("gemm: every order") {
  Problem odd({gguf::DType::Q4_K, 66, 65, 256, true, true}, 200), tail({gguf::DType::Q5_0, 9, 12, 96}, 201);
  simt::in_every_order([&] {
    CHECK(odd.run() < 1.0);
    CHECK(tail.run() < 1.0);
  });
}

TEST_CASE("gemm: weights that halves do not hold, and NaNs, are seen in the result") {
  for (const gguf::DType type : {gguf::DType::F32, gguf::DType::BF16}) {
    for (const float weight : {1e9f, -1e9f, std::numeric_limits<float>::quiet_NaN()}) {
      constexpr int kCols = 32;
      std::vector<std::uint8_t> file(matrices::row_bytes(type, kCols));
      const std::size_t bytes = file.size() / kCols;
      std::memcpy(file.data(), reinterpret_cast<const std::uint8_t*>(&weight) + 4 - bytes, bytes);
      const matrices::Packed packed("w", type, 1, kCols, file);
      simt::Buffer<half> x("x", std::vector<half>(kCols, __float2half(1.0f)));
      simt::Buffer<float> steps("steps", std::vector<float>{1.0f}), y("y", 1);
      gemm({packed.matrix, {x.data(), steps.data(), kCols}, 1, nullptr, y.data(), false, 1.0f}, nullptr);
      CHECK(!std::isfinite(y[0]));
    }
  }
}

TEST_CASE("gemm: sectors and bank conflicts" * doctest::skip(simt::kHardware)) {
  for (const gguf::DType type : {gguf::DType::Q4_0, gguf::DType::Q4_K, gguf::DType::Q6_K, gguf::DType::F16}) {
    CAPTURE(std::string(gguf::traits(type).name));
    Problem problem({type, 64, 64, 1024}, 300);
    CHECK(problem.run() < 1.0);
    for (const simt::LineCount& line : simt::report().lines) {
      if (line.file != "gemm.h") continue;
      CAPTURE(line.line);
      CHECK(line.wavefronts == line.least_wavefronts);
      CHECK(line.sectors == line.least_sectors);
    }
    // Codes are whole sectors; scales share theirs with those of the next step.
    CHECK(problem.of_w.bytes_read >= problem.of_w.unique_read);
    CHECK(problem.of_w.sectors_read * 32 <= problem.of_w.unique_read * 4 / 3);
  }
}

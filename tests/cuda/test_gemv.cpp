// Products against float64 of the same weights, and of the input as it was quantized.
#include "cuda/gemv.h"

#include <doctest/doctest.h>

#include <cstring>
#include <numbers>
#include <string>

#include "cpu/kernels.h"
#include "matrices.h"
#include "quantized.h"
#include "random_shapes.h"
#include "simt/helpers.h"

using namespace ringlm;
using namespace ringlm::cuda;
using gguf::DType;
using quantized::random_floats;

namespace {

std::size_t size(int n) { return static_cast<std::size_t>(n); }

// A matrix as a kernel has it, and its numbers. With experts: one below the other.
struct Weights {
  int rows, cols;
  std::vector<std::uint8_t> file;
  std::vector<float> values;
  matrices::Packed packed;

  Weights(const char* name, DType type, int rows_, int cols_, std::mt19937& random, int experts = 1)
      : rows(rows_),
        cols(cols_),
        file(matrices::random_rows(type, rows * experts, cols, random)),
        values(matrices::numbers(type, file)),
        packed(name, type, rows, cols, file, experts) {}

  // Of row r and an input: the sum of products, and of their magnitudes.
  template <class X>
  std::pair<double, double> product(int r, X x) const {
    double sum = 0, magnitude = 0;
    for (int c = 0; c < cols; ++c) {
      const double term = static_cast<double>(values[size(r * cols + c)]) * x(c);
      sum += term;
      magnitude += std::abs(term);
    }
    return {sum, magnitude};
  }
};

struct Input : quantized::Rows {
  std::vector<float> x;
  Input(int M_, int cols_, std::mt19937& random)
      : Rows("input", M_, cols_), x(random_floats(size(M_ * cols_), random)) {
    fill(x, x);
  }
  double inverse_rms(int m, double eps) const {
    double sum = 0;
    for (int c = 0; c < cols; ++c) sum += static_cast<double>(x[size(m * cols + c)]) * x[size(m * cols + c)];
    return 1.0 / std::sqrt(sum / cols + eps);
  }
};

Gemv plain(const Weights& w, const Quantized& x, int M, float* y) {
  Gemv a{};
  a.w[0] = w.packed.matrix;
  a.n = 1;
  a.x = x;
  a.M = M;
  a.end = End::Store;
  a.y[0] = y;
  a.scale = 1.0f;
  return a;
}

void check_no_bypass() { CHECK(simt::report().bypass_lines == std::vector<std::string>{}); }

void check_products(DType type, int rows, int cols, int M) {
  CAPTURE(rows);
  CAPTURE(cols);
  CAPTURE(M);
  std::mt19937 random(static_cast<unsigned>(rows + cols + M));
  const Weights w("weights", type, rows, cols, random);
  Input in(M, cols, random);
  simt::Buffer<float> y("y", size(M * rows));
  gemv(plain(w, in.of(false), M, y.data()), nullptr);
  double worst = 0, worst_of_input = 0;
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < rows; ++r) {
      const auto [sum, magnitude] = w.product(r, [&](int c) { return in.value(m, c); });
      const double unrounded =
          w.product(r, [&](int c) { return static_cast<double>(in.x[size(m * cols + c)]); }).first;
      const double found = y[size(m * rows + r)];
      worst = simt::larger(worst, std::abs(found - sum) / magnitude);
      worst_of_input = simt::larger(worst_of_input, std::abs(found - unrounded) / magnitude);
    }
  }
  CHECK(worst < 5e-6);
  CHECK(worst_of_input < 1e-4);
}

std::vector<int> columns_of(DType type) {
  switch (gguf::traits(type).block_size) {
    case 256:
      return {256, 1280, 4864};
    case 32:
      return {32, 64, 576, 896, 1056, 4864};
    default:
      return {32, 77, 896, 1056};
  }
}

}  // namespace

TEST_CASE("products of every type") {
  for (const DType type : matrices::kTypes) {
    CAPTURE(std::string(gguf::traits(type).name));
    int i = 0;
    for (const int cols : columns_of(type)) {
      constexpr int kRows[] = {70, 3, 33, 1, 32, 12}, kM[] = {1, 8, 2, 5, 3, 4};
      check_products(type, kRows[i % 6], cols, kM[i % 6]);
      ++i;
    }
  }
  check_no_bypass();
}

TEST_CASE("products of random shapes") {
  shapes::Choice choice(3);
  for (unsigned i = 0; i < shapes::kMany; ++i) {
    CAPTURE(i);
    const DType type = choice.one_of(matrices::kTypes);
    const int unit = static_cast<int>(gguf::traits(type).block_size);
    const int rows = choice.between(1, 90), cols = unit * choice.between(1, 1500 / unit);
    const int M = choice.between(1, kMostRows);
    simt::in_one_order(i, [&] { check_products(type, rows, cols, M); });
  }
  check_no_bypass();
}

TEST_CASE("a row of a batch is the row alone, bit for bit") {
  constexpr int kRows = 20;
  for (const DType type : matrices::kTypes) {
    CAPTURE(std::string(gguf::traits(type).name));
    std::mt19937 random(5);
    const int cols = 1280;
    const Weights w("weights", type, kRows, cols, random);
    Input in(kMostRows, cols, random);
    simt::Buffer<float> alone("alone", kMostRows * kRows);
    for (int m = 0; m < kMostRows; ++m) {
      gemv(plain(w, in.row(m, true), 1, alone.data() + m * kRows), nullptr);
    }
    for (const int M : {2, 7, 8}) {
      CAPTURE(M);
      simt::Buffer<float> batch("batch", size(M * kRows));
      gemv(plain(w, in.of(true), M, batch.data()), nullptr);
      CHECK(std::memcmp(batch.data(), alone.data(), batch.size() * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("three products, norm, bias, scale and soft cap") {
  constexpr int kRows[3] = {40, 8, 70}, kCols = 256, kM = 3;
  std::mt19937 random(6);
  const Weights w[3] = {{"q", DType::Q4_K, kRows[0], kCols, random},
                        {"k", DType::Q4_K, kRows[1], kCols, random},
                        {"v", DType::Q4_K, kRows[2], kCols, random}};
  Input in(kM, kCols, random);
  for (float& x : in.x) x *= 3.0f;
  in.fill(in.x, in.x);
  simt::Buffer<float> bias("bias", random_floats(40, random));
  simt::in_every_order([&] {
    simt::Buffer<float> q("q", kM * 40), k("k", kM * 8), v("v", kM * 70);
    Gemv a = plain(w[0], in.of(true), kM, q.data());
    a.w[1] = w[1].packed.matrix;
    a.w[2] = w[2].packed.matrix;
    a.n = 3;
    a.norm_eps = 0.5f;
    a.bias[0] = bias.data();
    a.y[1] = k.data();
    a.y[2] = v.data();
    a.scale = 0.25f;
    a.softcap = 2.0f;
    gemv(a, nullptr);
    for (int p = 0; p < 3; ++p) {
      for (int m = 0; m < kM; ++m) {
        for (int r = 0; r < kRows[p]; ++r) {
          const double sum = w[p].product(r, [&](int c) { return in.value(m, c); }).first;
          const double y = 0.25 * (sum * in.inverse_rms(m, 0.5) + (p == 0 ? bias[size(r)] : 0.0f));
          const double found = a.y[p][m * kRows[p] + r];
          CHECK(found == doctest::Approx(2.0 * std::tanh(y / 2.0)).epsilon(1e-4).scale(1.0));
        }
      }
    }
    check_no_bypass();
  });
}

namespace {

// Columns of row m of what a kernel quantized: within half a step of what they should be, and zeros behind.
void check_quantized(quantized::Rows& found, int m, const std::vector<double>& expected) {
  double worst = 0;
  for (int c = 0; c < blocks_of(found.cols) * kBlock; ++c) {
    const double should = c < found.cols ? expected[size(c)] : 0.0;
    const double step = found.scale(m, c / kBlock).x;
    worst = simt::larger(worst, (std::abs(found.value(m, c) - should) - 1e-5 * std::abs(should)) / step);
  }
  CHECK(worst < 0.55);
}

}  // namespace

TEST_CASE("residual and the next input") {
  constexpr int kRows = 70, kCols = 96, kM = 5;
  std::mt19937 random(7);
  const Weights w("weights", DType::Q5_1, kRows, kCols, random);
  Input in(kM, kCols, random);
  const std::vector<float> before = random_floats(kM * kRows, random);
  simt::Buffer<float> bias("bias", random_floats(kRows, random)), norm("norm", random_floats(kRows, random));
  for (const bool normed : {true, false}) {
    simt::in_every_order([&] {
      simt::Buffer<float> residual("residual", before);
      quantized::Rows next("next", kM, kRows);
      Gemv a = plain(w, in.of(false), kM, nullptr);
      a.end = End::Residual;
      a.bias[0] = bias.data();
      a.scale = 0.5f;
      a.residual = residual.data();
      a.next_norm = normed ? norm.data() : nullptr;
      a.next = next.of(normed);
      gemv(a, nullptr);
      for (int m = 0; m < kM; ++m) {
        std::vector<double> expected(kRows);
        double squares = 0, found_squares = 0;
        for (int r = 0; r < kRows; ++r) {
          const double sum = w.product(r, [&](int c) { return in.value(m, c); }).first;
          const double x = before[size(m * kRows + r)] + 0.5 * (sum + bias[size(r)]);
          CHECK(residual[size(m * kRows + r)] == doctest::Approx(x).epsilon(1e-5).scale(1.0));
          expected[size(r)] = x * (normed ? norm[size(r)] : 1.0f);
          squares += x * x;
        }
        check_quantized(next, m, expected);
        for (int b = 0; normed && b < blocks_of(kRows); ++b) found_squares += next.square(m, b);
        if (normed) CHECK(found_squares == doctest::Approx(squares).epsilon(1e-4));
      }
      check_no_bypass();
    });
  }
}

TEST_CASE("gate and up") {
  constexpr int kRows = 44, kCols = 512;
  for (const auto kind : {Activation::Silu, Activation::Gelu}) {
    const int M = kind == Activation::Silu ? 1 : 4;
    std::mt19937 random(8);
    const Weights gate("gate", DType::Q6_K, kRows, kCols, random),
        up("up", DType::Q6_K, kRows, kCols, random);
    Input in(M, kCols, random);
    simt::Buffer<float> y("y", size(M * kRows)), bias("bias", random_floats(kRows, random));
    quantized::Rows next("next", M, kRows);
    Gemv a = plain(gate, in.of(true), M, y.data());
    a.w[1] = up.packed.matrix;
    a.n = 2;
    a.end = End::GateUp;
    a.bias[1] = bias.data();
    a.activation = kind;
    a.next = next.of(false);
    gemv(a, nullptr);
    for (int m = 0; m < M; ++m) {
      std::vector<double> expected(kRows);
      for (int r = 0; r < kRows; ++r) {
        const auto x = [&](int c) { return in.value(m, c) * in.inverse_rms(m, 0.0); };
        const double g = gate.product(r, x).first, u = up.product(r, x).first + bias[size(r)];
        const double tanh_of = std::sqrt(2.0 / std::numbers::pi) * (g + 0.044715 * g * g * g);
        expected[size(r)] =
            (kind == Activation::Silu ? g / (1.0 + std::exp(-g)) : g * 0.5 * (1.0 + std::tanh(tanh_of))) * u;
        CHECK(y[size(m * kRows + r)] == doctest::Approx(expected[size(r)]).epsilon(1e-4).scale(0.1));
      }
      check_quantized(next, m, expected);
    }
    check_no_bypass();
  }
}

TEST_CASE("experts") {
  constexpr int kExperts = 5, kSlots = 2, kM = 3, kRows = 36, kCols = 256;
  std::mt19937 random(9);
  const Weights w("weights", DType::Q4_K, kRows, kCols, random, kExperts);
  simt::Buffer<std::int32_t> experts("experts", {4, 0, 2, 3, 0, 1});
  for (const bool by_slot : {false, true}) {
    Input in(by_slot ? kM * kSlots : kM, kCols, random);
    simt::Buffer<float> y("y", kM * kSlots * kRows);
    quantized::Rows next("next", kM * kSlots, kRows);
    Gemv a = plain(w, in.of(true), kM, y.data());
    a.experts = experts.data();
    a.slots = kSlots;
    a.input_by_slot = by_slot;
    const auto product = [&](int i, int r) {
      const int m = by_slot ? i : i / kSlots;
      const int row = experts[size(i)] * kRows + r;
      return w.product(row, [&](int c) { return in.value(m, c) * in.inverse_rms(m, 0.0); }).first;
    };
    simt::in_every_order([&] {
      gemv(a, nullptr);
      for (int i = 0; i < kM * kSlots; ++i) {
        for (int r = 0; r < kRows; ++r) {
          CHECK(y[size(i * kRows + r)] == doctest::Approx(product(i, r)).epsilon(1e-4).scale(1.0));
        }
      }
    });
    a.end = End::GateUp;  // a matrix as its own gate
    a.w[1] = a.w[0];
    a.n = 2;
    a.y[0] = nullptr;
    a.next = next.of(false);
    gemv(a, nullptr);
    for (int i = 0; i < kM * kSlots; ++i) {
      std::vector<double> expected(kRows);
      for (int r = 0; r < kRows; ++r) {
        const double g = product(i, r);
        expected[size(r)] = g * g / (1.0 + std::exp(-g));
      }
      check_quantized(next, i, expected);
    }
  }
  check_no_bypass();
}

namespace {

// A warp a block of 32 columns of one row.
__global__ void quantize_row(const float* x, const Quantized to) {
  const int block = static_cast<int>(blockIdx.x), column = block * kBlock + static_cast<int>(threadIdx.x);
  quantize_block(to, 0, block, column < to.cols ? ld_global(x + column) : 0.0f);
}

}  // namespace

TEST_CASE("codes and scales are those of the CPU backend") {
  constexpr int kCols = 32 * 12;
  std::mt19937 random(10);
  std::vector<float> x = random_floats(kCols, random);
  for (int c = 0; c < 32; ++c) {
    x[size(32 + c)] = 0.0f;
    x[size(64 + c)] = 1e-31f;
    x[size(96 + c)] *= 1e30f;
    x[size(128 + c)] *= 1e-28f;
    x[size(160 + c)] = static_cast<float>(c - 16) + 0.5f;
  }
  x[192] = INFINITY;
  x[230] = NAN;
  x[260] = -500.0f;
  simt::Buffer<float> device("x", x);
  quantized::Rows found("found", 1, kCols);
  LAUNCH(quantize_row, dim3(kCols / 32), dim3(32), 0, nullptr, device.data(), found.of(true));
  check_no_bypass();

  const auto same = [](float a, float b) { return std::isnan(a) ? std::isnan(b) : to_bits(a) == to_bits(b); };
  for (const cpu::Kernels* k : cpu::runnable_kernels()) {
    CAPTURE(std::string(k->name));
    simt::Buffer<std::byte> bytes("cpu", cpu::act_bytes(kCols, 1));
    k->quantize(x.data(), kCols, bytes.data(), 0, 1);
    for (int b = 0; b < kCols / 32; ++b) {
      CAPTURE(b);
      const std::byte* const at = bytes.data() + size(b) * cpu::kActBytes;
      cpu::ActSums sums;
      std::memcpy(&sums, at + sizeof(cpu::ActDigits), sizeof sums);
      const float4 scale = found.scale(0, b);
      CHECK(same(scale.x, sums.scale));
      CHECK(same(scale.y, sums.half_sums[0]));
      CHECK(same(scale.z, sums.half_sums[1]));
      CHECK(same(scale.w, sums.sum));
      if (std::string(k->name) != "generic") continue;  // others have orders of their own (cpu/words.h)
      std::int16_t codes[kBlock];
      std::memcpy(codes, at, sizeof codes);
      for (int c = 0; c < kBlock; ++c) {  // in fours: 0 2 1 3
        CHECK(found.code(0, 32 * b + c) == codes[c / 4 * 4 + (c % 4 == 1 ? 2 : c % 4 == 2 ? 1 : c % 4)]);
      }
    }
  }
}

TEST_CASE("every sector of the weights is read once, in full" *
          doctest::skip(simt::kRaceBuild || simt::kHardware)) {
  constexpr int kRows = 32, kCols = 4096;
  for (const DType type : matrices::kTypes) {
    CAPTURE(std::string(gguf::traits(type).name));
    std::mt19937 random(11);
    Weights w("weights", type, kRows, kCols, random);
    Input in(1, kCols, random);
    simt::Buffer<float> y("y", kRows);
    simt::reset_report();
    gemv(plain(w, in.of(true), 1, y.data()), nullptr);
    const simt::Report report = simt::report();
    const simt::BufferCount count = report.buffer("weights");
    CHECK(count.unique_read == count.size);
    CHECK(count.sectors_read * 32 == count.size);
    CHECK(static_cast<double>(count.sectors_read) * 32 <= 1.03 * static_cast<double>(w.file.size()));
    if (gguf::traits(type).block_size == 1) continue;  // their inputs are read in smaller pieces
    for (const simt::LineCount& line : report.lines) {
      if (line.file != "gemv.h" || line.op != simt::Op::kGlobalLoad) continue;
      CAPTURE(line.line);
      CHECK(line.sectors == line.least_sectors);
    }
  }
}

// Rows of the table are those of the file, bit for bit, times the scale; and the input of the first product.
#include <doctest/doctest.h>

#include <string>

#include "cuda/launch.h"
#include "matrices.h"
#include "quantized.h"
#include "simt/helpers.h"

using namespace ringlm;
using namespace ringlm::cuda;

namespace {

std::size_t size(int n) { return static_cast<std::size_t>(n); }

void check_embedding(gguf::DType type, int cols, bool normed) {
  CAPTURE(cols);
  CAPTURE(normed);
  constexpr int kVocab = 7, kTokens[] = {6, 0, 3, 6}, kM = 4;
  std::mt19937 random(static_cast<unsigned>(cols));
  const std::vector<std::uint8_t> file = matrices::random_rows(type, kVocab, cols, random);
  const std::vector<float> values = matrices::numbers(type, file);
  const matrices::Packed table("table", type, kVocab, cols, file);
  simt::Buffer<DeviceRow> rows("rows", kM);
  for (int m = 0; m < kM; ++m) rows[size(m)] = {m, 1, nullptr, kTokens[m]};
  simt::Buffer<float> x("x", size(kM * cols)), norm("norm", quantized::random_floats(size(cols), random));
  quantized::Rows next("next", kM, cols);
  embed({rows.data(), kM, table.matrix, 1.5f, x.data(), normed ? norm.data() : nullptr, next.of(normed)},
        nullptr);

  quantized::Rows expected("expected", kM, cols);
  std::vector<float> before(x.size()), after(x.size());
  int wrong = 0;
  for (int m = 0; m < kM; ++m) {
    for (int c = 0; c < cols; ++c) {
      const std::size_t at = size(m * cols + c);
      before[at] = 1.5f * values[size(kTokens[m] * cols + c)];
      after[at] = before[at] * (normed ? norm[size(c)] : 1.0f);
      wrong += to_bits(x[at]) != to_bits(before[at]);
    }
  }
  CHECK(wrong == 0);
  expected.fill(after, before);
  double apart = 0;  // in codes
  for (int m = 0; m < kM; ++m) {
    for (int b = 0; b < blocks_of(cols); ++b) {
      for (int c = 32 * b; c < 32 * b + 32; ++c) {
        apart = std::max(apart, std::abs(double{1} * next.code(m, c) - expected.code(m, c)));
      }
      CHECK(next.scale(m, b).x == doctest::Approx(expected.scale(m, b).x).epsilon(1e-6));
      CHECK(next.scale(m, b).w == doctest::Approx(expected.scale(m, b).w).epsilon(1e-3).scale(1.0));
      if (normed) CHECK(next.square(m, b) == doctest::Approx(expected.square(m, b)).epsilon(1e-5));
    }
  }
  CHECK(apart <= 1);  // the test divides by the step, the kernel multiplies with its inverse
  CHECK(simt::report().bypass_lines == std::vector<std::string>{});
}

}  // namespace

TEST_CASE("embeddings of every type") {
  for (const gguf::DType type : matrices::kTypes) {
    CAPTURE(std::string(gguf::traits(type).name));
    const int unit = static_cast<int>(gguf::traits(type).block_size);
    check_embedding(type, unit == 256 ? 1280 : 1056, true);
    check_embedding(type, unit == 256 ? 256 : unit == 32 ? 96 : 77, false);
  }
}

TEST_CASE("embeddings in every order, and without a next input") {
  simt::in_every_order([] { check_embedding(gguf::DType::Q6_K, 512, true); });
  std::mt19937 random(1);
  const std::vector<std::uint8_t> file = matrices::random_rows(gguf::DType::Q8_0, 2, 64, random);
  const matrices::Packed table("table", gguf::DType::Q8_0, 2, 64, file);
  simt::Buffer<DeviceRow> rows("rows", std::vector<DeviceRow>{{0, 1, nullptr, 1}});
  simt::Buffer<float> x("x", 64);
  embed({rows.data(), 1, table.matrix, 1.0f, x.data(), nullptr, {}}, nullptr);
  CHECK(std::equal(x.begin(), x.end(), matrices::numbers(gguf::DType::Q8_0, file).begin() + 64));
}

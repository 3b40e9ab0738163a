#include "kv/rotation.h"

#include <array>
#include <bit>
#include <cmath>
#include <initializer_list>

namespace ringlm::kv {
namespace {

constexpr std::int32_t kMostRows = 20;

// H = I + S, S skew: a first row of ones, a first column of minus ones, and the quadratic characters of
// i - j modulo the prime q = n - 1, which is 3 modulo 4.
template <std::int32_t N>
constexpr std::array<std::array<float, N>, N> paley() {
  constexpr std::int32_t q = N - 1;
  std::array<bool, q> square{};
  for (std::int32_t i = 1; i < q; ++i) square[static_cast<std::size_t>(i * i % q)] = true;
  std::array<std::array<float, N>, N> h{};
  for (std::int32_t i = 0; i < N; ++i) {
    for (std::int32_t j = 0; j < N; ++j) {
      const auto difference = static_cast<std::size_t>((i - j + q) % q);
      const bool plus = i == j || i == 0 || (j != 0 && square[difference]);
      h[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)] = plus ? 1.0f : -1.0f;
    }
  }
  return h;
}

constexpr auto kH12 = paley<12>();
constexpr auto kH20 = paley<20>();

void flip(const Rotation& r, float* x) {
  for (std::int32_t i = 0; i < r.head_dim; ++i) x[i] *= rotation_sign(i);
}

// Sylvester's matrix on `width` elements: sums and differences of halves, over and over.
void walsh_hadamard(float* x, std::int32_t width) {
  for (std::int32_t half = 1; half < width; half *= 2) {
    for (std::int32_t at = 0; at < width; at += 2 * half) {
      for (std::int32_t i = at; i < at + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
}

// H_m, or its transpose, on every column of x [m][width].
template <std::size_t N>
void mix_rows(const std::array<std::array<float, N>, N>& h, float* x, std::int32_t width, bool transposed) {
  for (std::int32_t c = 0; c < width; ++c) {
    std::array<float, N> column;
    for (std::size_t i = 0; i < N; ++i) column[i] = x[static_cast<std::int64_t>(i) * width + c];
    for (std::size_t i = 0; i < N; ++i) {
      float sum = 0.0f;
      for (std::size_t j = 0; j < N; ++j) sum += (transposed ? h[j][i] : h[i][j]) * column[j];
      x[static_cast<std::int64_t>(i) * width + c] = sum;
    }
  }
}

void transform(const Rotation& r, float* x, bool transposed) {
  const std::int32_t block = r.m * r.width;
  const float scale = 1.0f / std::sqrt(static_cast<float>(block));
  for (std::int32_t at = 0; at < r.head_dim; at += block) {
    for (std::int32_t row = 0; row < r.m; ++row) walsh_hadamard(x + at + row * r.width, r.width);
    if (r.m == 12) mix_rows(kH12, x + at, r.width, transposed);
    if (r.m == 20) mix_rows(kH20, x + at, r.width, transposed);
    for (std::int32_t i = at; i < at + block; ++i) x[i] *= scale;
  }
}

}  // namespace

float rotation_sign(std::int32_t i) {
  const auto bits = static_cast<std::uint32_t>(i);
  return std::popcount(bits & (bits >> 1)) % 2 != 0 ? -1.0f : 1.0f;
}

Rotation make_rotation(std::int32_t head_dim) {
  Rotation best{head_dim, 1, 1};
  for (const std::int32_t m : {1, 12, kMostRows}) {
    if (head_dim % m != 0) continue;
    const std::int32_t width = (head_dim / m) & -(head_dim / m);  // the largest power of two that divides it
    if (m * width > best.m * best.width) best = {head_dim, m, width};
  }
  return best;
}

void rotate(const Rotation& r, float* x) {
  flip(r, x);
  transform(r, x, false);
}

void rotate_back(const Rotation& r, float* x) {
  transform(r, x, true);
  flip(r, x);
}

}  // namespace ringlm::kv

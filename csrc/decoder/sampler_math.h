// The arithmetic of the sampler. It uses only IEEE operations in a fixed order, so that a seed gives the
// same tokens on every machine; the C library's exp and log differ in the last bit between platforms.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace ringlm::detail {

// Four floats: one register of SSE2 and of NEON. g++ and clang++ share this extension.
using F4 = float __attribute__((vector_size(16)));
using I4 = std::int32_t __attribute__((vector_size(16)));
using U4 = std::uint32_t __attribute__((vector_size(16)));

inline F4 load4(const float* p) {
  F4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline F4 splat(float v) { return F4{v, v, v, v}; }
inline F4 keep_if(I4 mask, F4 v) { return (F4)(mask & (I4)v); }

// The larger of each two, b where one of them is NaN; a bit for each lane of a mask. For both SSE has one
// instruction, which g++ does not find by itself.
#ifdef __SSE2__
inline F4 max4(F4 a, F4 b) { return (F4)_mm_max_ps((__m128)a, (__m128)b); }
inline unsigned bits_of(I4 mask) { return static_cast<unsigned>(_mm_movemask_ps((__m128)mask)); }
#else
inline F4 max4(F4 a, F4 b) { return a > b ? a : b; }
inline unsigned bits_of(I4 mask) {
  const I4 bits = mask & I4{1, 2, 4, 8};
  return static_cast<unsigned>((bits[0] | bits[1]) | (bits[2] | bits[3]));
}
#endif

constexpr float kLog2E = 0x1.715476p0f;

// 2^y for -126 <= y <= 0, within 1.25 ulp; some value for others. With y = n + f and |f| <= 1/2:
// 2^f = 1 + f p(f), where p of degree 5 minimizes the largest relative error over the interval (2e-9, then
// rounded to floats), and n goes into the exponent. Of a float, in a form that compilers vectorize.
[[gnu::always_inline]] inline float exp2_in_range(float y) {
  constexpr float round = 0x1.8p23f;  // adding it leaves the nearest integer in the low bits
  const float shifted = y + round;
  const float f = y - (shifted - round);
  float p = 0x1.41fbbcp-13f;
  p = p * f + 0x1.5f3e52p-10f;
  p = p * f + 0x1.3b2d4cp-7f;
  p = p * f + 0x1.c6aee8p-5f;
  p = p * f + 0x1.ebfbdcp-3f;
  p = p * f + 0x1.62e43p-1f;
  const float e = p * f + 1.0f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(e) +
                              (std::bit_cast<std::uint32_t>(shifted) << 23));
}

// The same for y <= 0; 2^-126 for y < -126 and NaN, so that no result is denormal.
inline F4 exp2_nonpositive(F4 y) {
  F4 e;
  for (int i = 0; i < 4; ++i) e[i] = exp2_in_range(y[i] > -126.0f ? y[i] : -126.0f);
  return e;
}

// ln(x) for finite x > 0, to about 2 ulp: x = 2^e m with m in [1/sqrt 2, sqrt 2), ln m = 2 artanh((m - 1) /
// (m + 1)).
inline double log_positive(double x) {
  int e = 0;
  double m = std::frexp(x, &e);
  if (m < 0x1.6a09e667f3bcdp-1) {
    m *= 2;
    --e;
  }
  const double s = (m - 1) / (m + 1);
  const double s2 = s * s;
  double sum = 0;
  for (int k = 23; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
  return e * 0x1.62e42fefa39efp-1 + 2 * s * sum;
}

// xoshiro256++ 1.0, seeded through SplitMix64 as its authors advise. Blackman and Vigna, "Scrambled linear
// pseudorandom number generators", ACM TOMS 47 (2021), arXiv:1805.01407; Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", OOPSLA 2014.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) {
    for (std::uint64_t& word : state_) {
      seed += 0x9e3779b97f4a7c15;
      std::uint64_t z = seed;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
      z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
      word = z ^ (z >> 31);
    }
  }
  explicit Rng(const std::array<std::uint64_t, 4>& state) : state_(state) {}

  std::uint64_t next() {
    auto& s = state_;
    const std::uint64_t result = rotl(s[0] + s[3], 23) + s[0];
    const std::uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return result;
  }

  // Uniform in [0, 1), a multiple of 2^-53.
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  static std::uint64_t rotl(std::uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
  std::array<std::uint64_t, 4> state_;
};

}  // namespace ringlm::detail

// What the tests of kernels share.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "tiny_model.h"

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

inline std::vector<float> random_floats(std::size_t n, std::uint64_t seed, float scale = 1.0f) {
  tiny::Random random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = scale * random();
  return x;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// By the definition of binary16.
inline double half_value(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? std::nan("") : sign * HUGE_VAL;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

template <class F>
void for_each_isa(F f) {
  for (const ringlm::cpu::Kernels* k : ringlm::cpu::runnable_kernels()) {
    CAPTURE(std::string(k->name));
    f(*k);
  }
}

}  // namespace

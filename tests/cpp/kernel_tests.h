// What the tests of kernels share.
#pragma once

#include <doctest/doctest.h>

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

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> random_floats(std::size_t n, std::uint64_t seed, float scale = 1.0f) {
  tiny::Random random(seed);
  std::vector<float> x(n);
  for (float& v : x) v = scale * random();
  return x;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class F>
void for_each_isa(F f) {
  for (const ringlm::cpu::Kernels* k : ringlm::cpu::runnable_kernels()) {
    CAPTURE(std::string(k->name));
    f(*k);
  }
}

}  // namespace

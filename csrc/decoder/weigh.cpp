#include "decoder/weigh.h"

#include <bit>
#include <cstdint>

#include "decoder/sampler_math.h"

namespace ringlm::detail {
namespace {

constexpr std::size_t kLanes = 16;

// Inlined into each version below and compiled for its instructions. The loops fix the order of the sums
// for registers of up to kLanes floats.
[[gnu::always_inline]] inline double weigh(const float* x, float max, float scale, float lowest,
                                           float* weights) {
  for (std::size_t i = 0; i < kBlock; ++i) {
    // With a mask: a branch would keep the compiler from vectorizing.
    const std::uint32_t mask = x[i] >= lowest ? 0xffffffffu : 0u;
    const float w = exp2_in_range((x[i] - max) * scale);
    weights[i] = std::bit_cast<float>(std::bit_cast<std::uint32_t>(w) & mask);
  }
  float lanes[kLanes] = {};
  for (std::size_t i = 0; i < kBlock; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) lanes[j] += weights[i + j];
  }
  double sums[kLanes];
  for (std::size_t j = 0; j < kLanes; ++j) sums[j] = static_cast<double>(lanes[j]);
  for (std::size_t n = kLanes / 2; n > 0; n /= 2) {
    for (std::size_t j = 0; j < n; ++j) sums[j] += sums[j + n];
  }
  return sums[0];
}

double weigh_baseline(const float* x, float max, float scale, float lowest, float* weights) {
  return weigh(x, max, scale, lowest, weights);
}

#ifdef __x86_64__
[[gnu::target("avx2")]] double weigh_avx2(const float* x, float max, float scale, float lowest,
                                          float* weights) {
  return weigh(x, max, scale, lowest, weights);
}
#endif

auto fastest() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return weigh_avx2;
#endif
  return weigh_baseline;
}

}  // namespace

double weigh_block(const float* x, float max, float scale, float lowest, float* weights) {
  static const auto version = fastest();
  return version(x, max, scale, lowest, weights);
}

}  // namespace ringlm::detail

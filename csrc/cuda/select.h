// Keys that order numbers with their indices: the larger number first, of equal ones the lower index. No two
// keys are equal, and none is zero.
#pragma once

#include "cuda/port.h"

namespace ringlm::cuda {

using Key = unsigned long long;

// Unsigned numbers in the order of floats, with one of both zeros.
__device__ __forceinline__ std::uint32_t ordered(float x) {
  const auto bits = bits_as<std::uint32_t>(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ Key key_of(float x, int index) {
  return Key{ordered(x)} << 32 | (0xffffffffu - static_cast<std::uint32_t>(index));
}
__device__ __forceinline__ int index_of(Key key) {
  return static_cast<int>(0xffffffffu - static_cast<std::uint32_t>(key));
}
__device__ __forceinline__ float number_of(Key key) {
  const auto order = static_cast<std::uint32_t>(key >> 32);
  return bits_as<float>((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

}  // namespace ringlm::cuda

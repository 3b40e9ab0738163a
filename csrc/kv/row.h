// One INT8 row. Internal linkage: each instruction set's translation unit compiles its own copy.
//   scale = f16(max |x| / 127), rounded up where it is subnormal;  code = round(x / scale), stored as code +
//   128
#pragma once

#include <cstdint>
#include <cstring>

#include "gguf/half.h"

namespace ringlm::kv {

constexpr int kCodeZero = 128;  // the stored byte that means 0

// Ties to even for |x| < 2^22.
static inline float round_to_even(float x) {
  constexpr float big = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction
  return (x + big) - big;
}

// x [n] to codes [n] and scale (two bytes, at any address).
static inline void store_int8(const float* x, std::uint8_t* codes, std::uint8_t* scale, std::int32_t n) {
  float largest = 0.0f;
  for (std::int32_t i = 0; i < n; ++i) {
    const float magnitude = x[i] < 0.0f ? -x[i] : x[i];
    largest = magnitude > largest ? magnitude : largest;
  }
  std::uint16_t half = f32_to_f16(largest / 127.0f);
  if (half < 0x0400 && 127.0f * f16_to_f32(half) < largest)
    ++half;  // subnormal: a step down would clip too much
  std::memcpy(scale, &half, sizeof half);
  const float step = half != 0 ? f16_to_f32(half) : 1.0f;
  for (std::int32_t i = 0; i < n; ++i) {
    float code = round_to_even(x[i] / step);
    code = code > 127.0f ? 127.0f : code;
    code = code >= -127.0f ? code : -127.0f;  // NaN too: a number that fits the conversion
    codes[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(code) + kCodeZero);
  }
}

static inline void load_int8(const std::uint8_t* codes, const std::uint8_t* scale, float* x, std::int32_t n) {
  std::uint16_t half;
  std::memcpy(&half, scale, sizeof half);
  const float step = f16_to_f32(half);
  for (std::int32_t i = 0; i < n; ++i) x[i] = static_cast<float>(codes[i] - kCodeZero) * step;
}

}  // namespace ringlm::kv

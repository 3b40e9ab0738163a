// IEEE binary16 and bfloat16 to and from float32. Everything here has internal linkage: each instruction
// set's translation unit compiles its own copy.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace ringlm {

// std::bit_cast with internal linkage.
static inline std::uint32_t to_bits(float f) {
  std::uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}
static inline float from_bits(std::uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

static inline float f16_to_f32(std::uint16_t h) {
#ifdef __F16C__
  return _cvtsh_ss(h);
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity and NaN
    return from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  // Placing the bits at float32's exponent and multiplying rebiases it, and normalizes subnormals.
  const float scaled = from_bits(magnitude << 13) * 0x1p112f;
  return from_bits(sign | to_bits(scaled));
#endif
}

// Round to nearest, ties to even; magnitudes from 65520 on become infinity.
static inline std::uint16_t f32_to_f16(float f) {
#ifdef __F16C__
  // Not _cvtss_sh: clang's is a macro with a C99 literal.
  const __m128i half = _mm_cvtps_ph(_mm_set_ss(f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return static_cast<std::uint16_t>(_mm_cvtsi128_si32(half));
#else
  const std::uint32_t bits = to_bits(f);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded value in the low bits
    const float shifted = from_bits(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (to_bits(shifted) - 0x3f000000u));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
#endif
}

// n halves, at any address.
static inline void f32_to_f16_row(const float* src, std::uint8_t* dst, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t h = f32_to_f16(src[i]);
    std::memcpy(dst + 2 * i, &h, sizeof h);
  }
}

static inline float bf16_to_f32(std::uint16_t h) { return from_bits(static_cast<std::uint32_t>(h) << 16); }

}  // namespace ringlm

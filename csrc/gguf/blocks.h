// How each tensor type stores a block of weights, as code that turns blocks back into float32.
//
// d and m are f16, q are the codes. The order of operations is that of the `gguf` package, so results are
// equal to the last bit. The row functions have internal linkage: each instruction set's translation unit
// compiles its own copy and the compiler vectorizes the plain loops (which needs __restrict: bytes may alias
// anything).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "gguf/half.h"
#include "gguf/types.h"

namespace ringlm {

// Whether the arithmetic of a type is here, and the list of those for which it is ("F32, F16, ...").
bool can_dequantize(gguf::DType type);
std::string dequantizable_types();

// src: whole blocks holding dst.size() elements. Throws InvalidArgument when the sizes do not agree and
// UnsupportedModelError for a type without arithmetic.
void dequantize(gguf::DType type, std::span<const std::byte> src, std::span<float> dst);

namespace blocks {

static inline std::uint16_t u16_at(const std::uint8_t* p) {
  std::uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline float f16_at(const std::uint8_t* p) { return f16_to_f32(u16_at(p)); }

// n elements each, whole blocks.
static inline void f32(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  std::memcpy(y, p, n * sizeof(float));
}

static inline void f16(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  std::size_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * i))));
  }
#endif
  for (; i < n; ++i) y[i] = f16_at(p + 2 * i);
}

static inline void bf16(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) y[i] = bf16_to_f32(u16_at(p + 2 * i));
}

// 32 weights: d, 16 bytes of two codes. y = (q - 8) d.
static inline void q4_0(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 32, p += 18, y += 32) {
    const float d = f16_at(p);
    for (int j = 0; j < 16; ++j) {
      y[j] = static_cast<float>((p[2 + j] & 15) - 8) * d;
      y[j + 16] = static_cast<float>((p[2 + j] >> 4) - 8) * d;
    }
  }
}

// 32 weights: d, m, 16 bytes of two codes. y = q d + m.
static inline void q4_1(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 32, p += 20, y += 32) {
    const float d = f16_at(p), m = f16_at(p + 2);
    for (int j = 0; j < 16; ++j) {
      y[j] = static_cast<float>(p[4 + j] & 15) * d + m;
      y[j + 16] = static_cast<float>(p[4 + j] >> 4) * d + m;
    }
  }
}

static inline std::uint32_t u32_at(const std::uint8_t* p) {
  std::uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// Five bits from a nibble and bit j of `high`.
static inline float five_bits(int nibble, std::uint32_t high, int j) {
  return static_cast<float>(nibble | static_cast<int>(((high >> j) << 4) & 16u));
}

// 32 weights: d, 4 bytes of fifth bits, 16 bytes of two codes. y = (q - 16) d.
static inline void q5_0(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 32, p += 22, y += 32) {
    const float d = f16_at(p);
    const std::uint32_t high = u32_at(p + 2);
    for (int j = 0; j < 16; ++j) {
      y[j] = (five_bits(p[6 + j] & 15, high, j) - 16.0f) * d;
      y[j + 16] = (five_bits(p[6 + j] >> 4, high, j + 16) - 16.0f) * d;
    }
  }
}

// 32 weights: d, m, 4 bytes of fifth bits, 16 bytes of two codes. y = q d + m.
static inline void q5_1(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 32, p += 24, y += 32) {
    const float d = f16_at(p), m = f16_at(p + 2);
    const std::uint32_t high = u32_at(p + 4);
    for (int j = 0; j < 16; ++j) {
      y[j] = five_bits(p[8 + j] & 15, high, j) * d + m;
      y[j + 16] = five_bits(p[8 + j] >> 4, high, j + 16) * d + m;
    }
  }
}

// 32 weights: d, 32 signed codes. y = q d.
static inline void q8_0(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 32, p += 34, y += 32) {
    const float d = f16_at(p);
    for (int j = 0; j < 32; ++j) y[j] = static_cast<float>(static_cast<std::int8_t>(p[2 + j])) * d;
  }
}

// 256 weights: 16 bytes of a 4-bit scale and a 4-bit minimum (one pair for 16 weights), 64 bytes of four
// codes, d, dmin. Half h of 128 weights: quarters of 32 take their bit pair from one shared set of bytes.
// y = q (d scale) - dmin minimum.
static inline void q2_k(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 256, p += 84, y += 256) {
    const float d = f16_at(p + 80), dmin = f16_at(p + 82);
    for (int g = 0; g < 16; ++g) {  // a scale covers 16 weights
      const std::uint8_t* q = p + 16 + 32 * (g / 8) + 16 * (g % 2);
      const int shift = g % 8 / 2 * 2;
      const float dg = d * static_cast<float>(p[g] & 15), mg = dmin * static_cast<float>(p[g] >> 4);
      for (int j = 0; j < 16; ++j) y[16 * g + j] = dg * static_cast<float>((q[j] >> shift) & 3) - mg;
    }
  }
}

// Sixteen 6-bit scales in 12 bytes: the low nibbles of the first eight and of the last eight in bytes 0-7,
// the upper bit pairs of scales i, i + 4, i + 8 and i + 12 in byte 8 + i. Scale i with its offset of 32 taken
// off.
static inline int q3_k_scale(const std::uint8_t* s, int i) {
  const int low = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
  return (low | (((s[8 + i % 4] >> (i / 4 * 2)) & 3) << 4)) - 32;
}

// 256 weights: 32 bytes of third bits (bit g of byte j belongs to weight j of group g of 32), 64 bytes of
// four low bit pairs as in Q2_K, 12 bytes of scales (one for 16 weights), d. A third bit that is clear takes
// 4 off. y = (d scale) q.
static inline void q3_k(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 256, p += 110, y += 256) {
    const float d = f16_at(p + 108);
    for (int g = 0; g < 16; ++g) {
      const std::uint8_t* high = p + 16 * (g % 2);
      const std::uint8_t* q = p + 32 + 32 * (g / 8) + 16 * (g % 2);
      const int shift = g % 8 / 2 * 2, bit = g / 2;
      const float dg = d * static_cast<float>(q3_k_scale(p + 96, g));
      for (int j = 0; j < 16; ++j) {
        y[16 * g + j] = dg * static_cast<float>(((q[j] >> shift) & 3) + (((high[j] >> bit) & 1) << 2) - 4);
      }
    }
  }
}

// Eight 6-bit scales and eight 6-bit minima in 12 bytes: the first four of each in the low bits of bytes 0-7,
// the low nibbles of the last four in bytes 8-11, their upper two bits on top of bytes 0-7.
static inline void k_scales(const std::uint8_t* s, std::uint8_t scale[8], std::uint8_t minimum[8]) {
  for (int j = 0; j < 4; ++j) {
    scale[j] = s[j] & 63;
    minimum[j] = s[j + 4] & 63;
    scale[j + 4] = static_cast<std::uint8_t>((s[j + 8] & 15) | ((s[j] >> 6) << 4));
    minimum[j + 4] = static_cast<std::uint8_t>((s[j + 8] >> 4) | ((s[j + 4] >> 6) << 4));
  }
}

// 256 weights: d, dmin, 12 bytes of scales, 128 bytes of two codes; eight groups of 32, in pairs that share
// their bytes. y = q (d scale) - dmin minimum.
static inline void q4_k(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 256, p += 144, y += 256) {
    const float d = f16_at(p), dmin = f16_at(p + 2);
    std::uint8_t scale[8], minimum[8];
    k_scales(p + 4, scale, minimum);
    for (int g = 0; g < 8; g += 2) {
      const std::uint8_t* q = p + 16 + 16 * g;
      const float d0 = d * scale[g], m0 = dmin * minimum[g];
      const float d1 = d * scale[g + 1], m1 = dmin * minimum[g + 1];
      for (int j = 0; j < 32; ++j) {
        y[32 * g + j] = d0 * static_cast<float>(q[j] & 15) - m0;
        y[32 * g + 32 + j] = d1 * static_cast<float>(q[j] >> 4) - m1;
      }
    }
  }
}

// 256 weights: as Q4_K with 32 bytes of fifth bits before the codes; bit g of byte j belongs to group g.
static inline void q5_k(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 256, p += 176, y += 256) {
    const float d = f16_at(p), dmin = f16_at(p + 2);
    std::uint8_t scale[8], minimum[8];
    k_scales(p + 4, scale, minimum);
    const std::uint8_t* high = p + 16;
    for (int g = 0; g < 8; g += 2) {
      const std::uint8_t* q = p + 48 + 16 * g;
      const float d0 = d * scale[g], m0 = dmin * minimum[g];
      const float d1 = d * scale[g + 1], m1 = dmin * minimum[g + 1];
      for (int j = 0; j < 32; ++j) {
        y[32 * g + j] = d0 * static_cast<float>((q[j] & 15) | (((high[j] >> g) & 1) << 4)) - m0;
        y[32 * g + 32 + j] = d1 * static_cast<float>((q[j] >> 4) | (((high[j] >> (g + 1)) & 1) << 4)) - m1;
      }
    }
  }
}

// 256 weights: 128 bytes of low nibbles, 64 bytes of upper bit pairs, 16 signed scales (one for 16 weights),
// d. Half h of 128 weights: quarters of 32 take nibble and bit pair from one shared set of bytes.
// y = (q - 32) (d scale).
static inline void q6_k(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 256, p += 210, y += 256) {
    const float d = f16_at(p + 208);
    for (int h = 0; h < 2; ++h) {
      const std::uint8_t* low = p + 64 * h;
      const std::uint8_t* high = p + 128 + 32 * h;
      const std::uint8_t* scale = p + 192 + 8 * h;
      float ds[8];
      for (int i = 0; i < 8; ++i) ds[i] = d * static_cast<float>(static_cast<std::int8_t>(scale[i]));
      for (int s = 0; s < 2; ++s) {  // a scale covers 16 weights
        for (int i = 0; i < 16; ++i) {
          const int j = 16 * s + i;
          float* out = y + 128 * h + j;
          out[0] = ds[s] * static_cast<float>(((low[j] & 15) | ((high[j] & 3) << 4)) - 32);
          out[32] = ds[s + 2] * static_cast<float>(((low[j + 32] & 15) | (((high[j] >> 2) & 3) << 4)) - 32);
          out[64] = ds[s + 4] * static_cast<float>(((low[j] >> 4) | (((high[j] >> 4) & 3) << 4)) - 32);
          out[96] = ds[s + 6] * static_cast<float>(((low[j + 32] >> 4) | ((high[j] >> 6) << 4)) - 32);
        }
      }
    }
  }
}

// What a code of IQ4_NL and IQ4_XS means: steps that widen away from zero.
static constexpr std::int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                               1,    13,   25,  38,  53,  69,  89,  113};

// 32 weights: d, 16 bytes of two codes. y = d value(q).
static inline void iq4_nl(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 32, p += 18, y += 32) {
    const float d = f16_at(p);
    for (int j = 0; j < 16; ++j) {
      y[j] = d * static_cast<float>(kIq4Values[p[2 + j] & 15]);
      y[j + 16] = d * static_cast<float>(kIq4Values[p[2 + j] >> 4]);
    }
  }
}

// Scale of group g of 32 weights of an IQ4_XS block: low nibbles in bytes 4-7, upper bit pairs in bytes 2-3.
static inline int iq4_xs_scale(const std::uint8_t* p, int g) {
  const int low = (p[4 + g / 2] >> (4 * (g % 2))) & 15;
  return (low | (((u16_at(p + 2) >> (2 * g)) & 3) << 4)) - 32;
}

// 256 weights: d, 2 + 4 bytes of eight 6-bit scales, 128 bytes of two codes; a group of 32 has 16 bytes of
// them. y = (d scale) value(q).
static inline void iq4_xs(const std::uint8_t* __restrict p, float* __restrict y, std::size_t n) {
  for (; n; n -= 256, p += 136, y += 256) {
    const float d = f16_at(p);
    for (int g = 0; g < 8; ++g) {
      const std::uint8_t* q = p + 8 + 16 * g;
      const float dg = d * static_cast<float>(iq4_xs_scale(p, g));
      for (int j = 0; j < 16; ++j) {
        y[32 * g + j] = dg * static_cast<float>(kIq4Values[q[j] & 15]);
        y[32 * g + 16 + j] = dg * static_cast<float>(kIq4Values[q[j] >> 4]);
      }
    }
  }
}

using RowFunction = void (*)(const std::uint8_t* blocks, float* y, std::size_t n);

// nullptr for a type without arithmetic.
static inline RowFunction row_function(gguf::DType type) {
  switch (type) {
    case gguf::DType::F32:
      return f32;
    case gguf::DType::F16:
      return f16;
    case gguf::DType::BF16:
      return bf16;
    case gguf::DType::Q4_0:
      return q4_0;
    case gguf::DType::Q4_1:
      return q4_1;
    case gguf::DType::Q5_0:
      return q5_0;
    case gguf::DType::Q5_1:
      return q5_1;
    case gguf::DType::Q8_0:
      return q8_0;
    case gguf::DType::Q2_K:
      return q2_k;
    case gguf::DType::Q3_K:
      return q3_k;
    case gguf::DType::Q4_K:
      return q4_k;
    case gguf::DType::Q5_K:
      return q5_k;
    case gguf::DType::Q6_K:
      return q6_k;
    case gguf::DType::IQ4_NL:
      return iq4_nl;
    case gguf::DType::IQ4_XS:
      return iq4_xs;
    default:
      return nullptr;
  }
}

}  // namespace blocks
}  // namespace ringlm

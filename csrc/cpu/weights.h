// Thirty-two weights of each quantized type as two vectors, in registers.
//
// The same formulas and roundings as gguf/blocks.h, where the layouts are described; results are bit-equal.
// Internal linkage: each instruction set's translation unit has its own.
#pragma once

#include <cstdint>

#include "cpu/simd.h"
#include "gguf/blocks.h"

namespace ringlm::cpu {
namespace {

struct f32x32 {
  f32x16 lo, hi;
};

inline u8x16 low_nibbles(u8x16 a) { return a & set1_u8(15); }
inline u8x16 high_nibbles(u8x16 a) { return shift_right(a, 4) & set1_u8(15); }

inline f32x32 times(f32x16 lo, f32x16 hi, float d) { return {lo * set1(d), hi * set1(d)}; }
inline f32x32 times_plus(f32x16 lo, f32x16 hi, float d, float m) {
  return {lo * set1(d) + set1(m), hi * set1(d) + set1(m)};
}
inline f32x32 times_minus(f32x16 lo, f32x16 hi, float d, float m) {
  return {lo * set1(d) - set1(m), hi * set1(d) - set1(m)};
}

// Each type: group i of 32 weights of a row.
struct Q4_0 {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 18 * static_cast<std::int64_t>(i);
    const u8x16 q = load_u8(p + 2);
    return times(to_f32(low_nibbles(q)) - set1(8.0f), to_f32(high_nibbles(q)) - set1(8.0f),
                 blocks::f16_at(p));
  }
};

struct Q4_1 {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 20 * static_cast<std::int64_t>(i);
    const u8x16 q = load_u8(p + 4);
    return times_plus(to_f32(low_nibbles(q)), to_f32(high_nibbles(q)), blocks::f16_at(p),
                      blocks::f16_at(p + 2));
  }
};

// Nibbles with a fifth bit from `high`.
inline f32x32 five_bits(u8x16 q, std::uint32_t high) {
  const u8x16 sixteen = set1_u8(16);
  return {to_f32(low_nibbles(q) | (bits_to_masks(high) & sixteen)),
          to_f32(high_nibbles(q) | (bits_to_masks(high >> 16) & sixteen))};
}

struct Q5_0 {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 22 * static_cast<std::int64_t>(i);
    const f32x32 q = five_bits(load_u8(p + 6), blocks::u32_at(p + 2));
    return times(q.lo - set1(16.0f), q.hi - set1(16.0f), blocks::f16_at(p));
  }
};

struct Q5_1 {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 24 * static_cast<std::int64_t>(i);
    const f32x32 q = five_bits(load_u8(p + 8), blocks::u32_at(p + 4));
    return times_plus(q.lo, q.hi, blocks::f16_at(p), blocks::f16_at(p + 2));
  }
};

struct Q8_0 {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 34 * static_cast<std::int64_t>(i);
    return times(signed_to_f32(load_u8(p + 2)), signed_to_f32(load_u8(p + 18)), blocks::f16_at(p));
  }
};

struct Q2_K {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 84 * static_cast<std::int64_t>(i / 8);
    const int half = i % 8 / 4, quarter = i % 4;
    const std::uint8_t* q = p + 16 + 32 * half;
    const std::uint8_t* scale = p + 2 * (i % 8);
    const float d = blocks::f16_at(p + 80), dmin = blocks::f16_at(p + 82);
    const auto weights = [=](int k) {  // a scale covers 16 weights
      const u8x16 codes = shift_right(load_u8(q + 16 * k), 2 * quarter) & set1_u8(3);
      return to_f32(codes) * set1(d * static_cast<float>(scale[k] & 15)) -
             set1(dmin * static_cast<float>(scale[k] >> 4));
    };
    return {weights(0), weights(1)};
  }
};

struct Q3_K {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 110 * static_cast<std::int64_t>(i / 8);
    const int g = i % 8, half = g / 4, quarter = g % 4;
    const std::uint8_t* q = p + 32 + 32 * half;
    const float d = blocks::f16_at(p + 108);
    const auto weights = [=](int k) {  // a scale covers 16 weights
      const u8x16 low = shift_right(load_u8(q + 16 * k), 2 * quarter) & set1_u8(3);
      const u8x16 third = shift_left(shift_right(load_u8(p + 16 * k), g) & set1_u8(1), 2);
      return (to_f32(low | third) - set1(4.0f)) *
             set1(d * static_cast<float>(blocks::q3_k_scale(p + 96, 2 * g + k)));
    };
    return {weights(0), weights(1)};
  }
};

// Scale and minimum of group g of a Q4_K or Q5_K block.
struct KScale {
  float d, m;
};
inline KScale k_scale(const std::uint8_t* p, int g) {
  const std::uint8_t* s = p + 4;
  const int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | ((s[g - 4] >> 6) << 4);
  const int minimum = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | ((s[g] >> 6) << 4);
  return {blocks::f16_at(p) * static_cast<float>(scale), blocks::f16_at(p + 2) * static_cast<float>(minimum)};
}

struct Q4_K {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 144 * static_cast<std::int64_t>(i / 8);
    const int g = i % 8;
    const std::uint8_t* q = p + 16 + 32 * (g / 2);
    const auto nibbles = [g](u8x16 a) { return to_f32(g % 2 == 0 ? low_nibbles(a) : high_nibbles(a)); };
    const KScale s = k_scale(p, g);
    return times_minus(nibbles(load_u8(q)), nibbles(load_u8(q + 16)), s.d, s.m);
  }
};

struct Q5_K {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 176 * static_cast<std::int64_t>(i / 8);
    const int g = i % 8;
    const std::uint8_t* q = p + 48 + 32 * (g / 2);
    const auto codes = [g](u8x16 a, u8x16 high) {
      const u8x16 fifth = shift_left(shift_right(high, g) & set1_u8(1), 4);
      return to_f32((g % 2 == 0 ? low_nibbles(a) : high_nibbles(a)) | fifth);
    };
    const KScale s = k_scale(p, g);
    return times_minus(codes(load_u8(q), load_u8(p + 16)), codes(load_u8(q + 16), load_u8(p + 32)), s.d, s.m);
  }
};

struct Q6_K {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 210 * static_cast<std::int64_t>(i / 8);
    const int half = i % 8 / 4, quarter = i % 4;
    const std::uint8_t* low = p + 64 * half + 32 * (quarter % 2);
    const std::uint8_t* high = p + 128 + 32 * half;
    const std::uint8_t* scale = p + 192 + 8 * half + 2 * quarter;
    const float d = blocks::f16_at(p + 208);
    const auto codes = [quarter](u8x16 a, u8x16 b) {
      const u8x16 pair = shift_left(shift_right(b, 2 * quarter) & set1_u8(3), 4);
      return to_f32((quarter < 2 ? low_nibbles(a) : high_nibbles(a)) | pair) - set1(32.0f);
    };
    const auto ds = [d, scale](int k) {
      return set1(d * static_cast<float>(static_cast<std::int8_t>(scale[k])));
    };
    return {codes(load_u8(low), load_u8(high)) * ds(0), codes(load_u8(low + 16), load_u8(high + 16)) * ds(1)};
  }
};

// The values of sixteen bytes of two codes.
inline f32x32 iq4_values(const std::uint8_t* q, float d) {
  const u8x16 table = load_u8(reinterpret_cast<const std::uint8_t*>(blocks::kIq4Values));
  const u8x16 codes = load_u8(q);
  return times(signed_to_f32(look_up(table, low_nibbles(codes))),
               signed_to_f32(look_up(table, high_nibbles(codes))), d);
}

struct IQ4_NL {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 18 * static_cast<std::int64_t>(i);
    return iq4_values(p + 2, blocks::f16_at(p));
  }
};

struct IQ4_XS {
  static f32x32 at(const std::uint8_t* row, std::int32_t i) {
    const std::uint8_t* p = row + 136 * static_cast<std::int64_t>(i / 8);
    const int g = i % 8;
    return iq4_values(p + 8 + 16 * g, blocks::f16_at(p) * static_cast<float>(blocks::iq4_xs_scale(p, g)));
  }
};

// Calls f with the type's struct; false for a type that has none here.
template <class F>
inline bool with_quantized(gguf::DType type, F f) {
  switch (type) {
    case gguf::DType::Q4_0:
      f(Q4_0{});
      return true;
    case gguf::DType::Q4_1:
      f(Q4_1{});
      return true;
    case gguf::DType::Q5_0:
      f(Q5_0{});
      return true;
    case gguf::DType::Q5_1:
      f(Q5_1{});
      return true;
    case gguf::DType::Q8_0:
      f(Q8_0{});
      return true;
    case gguf::DType::Q2_K:
      f(Q2_K{});
      return true;
    case gguf::DType::Q3_K:
      f(Q3_K{});
      return true;
    case gguf::DType::Q4_K:
      f(Q4_K{});
      return true;
    case gguf::DType::Q5_K:
      f(Q5_K{});
      return true;
    case gguf::DType::Q6_K:
      f(Q6_K{});
      return true;
    case gguf::DType::IQ4_NL:
      f(IQ4_NL{});
      return true;
    case gguf::DType::IQ4_XS:
      f(IQ4_XS{});
      return true;
    default:
      return false;
  }
}

}  // namespace
}  // namespace ringlm::cpu

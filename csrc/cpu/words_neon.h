// cpu/words.h on 64-bit ARM: plain NEON, with dot products of bytes, and with matrix products of bytes.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "gguf/blocks.h"

namespace ringlm::cpu {
namespace {

struct u32x16 {
  uint32x4_t v[4];
};
template <class F>
inline u32x16 each_word(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline u32x16 load_words(const std::uint8_t* p) {
  return each_word([=](int i) { return vreinterpretq_u32_u8(vld1q_u8(p + 16 * i)); });
}
inline u32x16 set1_u32(std::uint32_t x) {
  return each_word([=](int) { return vdupq_n_u32(x); });
}
inline u32x16 operator&(u32x16 a, u32x16 b) {
  return each_word([=](int i) { return vandq_u32(a.v[i], b.v[i]); });
}
inline u32x16 operator|(u32x16 a, u32x16 b) {
  return each_word([=](int i) { return vorrq_u32(a.v[i], b.v[i]); });
}
inline u32x16 operator^(u32x16 a, u32x16 b) {
  return each_word([=](int i) { return veorq_u32(a.v[i], b.v[i]); });
}
template <int N>
inline u32x16 shift_right(u32x16 a) {
  if constexpr (N == 0) {
    return a;
  } else {
    return each_word([=](int i) { return vshrq_n_u32(a.v[i], N); });
  }
}
template <int N>
inline u32x16 shift_left(u32x16 a) {
  return each_word([=](int i) { return vshlq_n_u32(a.v[i], N); });
}
template <int N>
inline u32x16 nibbles(u32x16 a) {
  if constexpr (N == 4) {
    return each_word(
        [=](int i) { return vreinterpretq_u32_u8(vshrq_n_u8(vreinterpretq_u8_u32(a.v[i]), 4)); });
  } else {
    return shift_right<N>(a) & set1_u32(0x0f0f0f0f);
  }
}
inline f32x16 to_f32(u32x16 a) {
  return each([=](int i) { return vcvtq_f32_u32(a.v[i]); });
}
template <int N>
inline f32x16 signed_byte(u32x16 a) {
  return each([=](int i) {
    return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_u32(a.v[i]), 24 - 8 * N), 24));
  });
}
inline u32x16 lookup(u8x16 table, u32x16 a) {
  return each_word(
      [=](int i) { return vreinterpretq_u32_u8(vqtbl1q_u8(table.v, vreinterpretq_u8_u32(a.v[i]))); });
}
inline u32x16 sixteens(const std::uint8_t* p) {
  return each_word([=](int i) {
    return vreinterpretq_u32_u8(vandq_u8(bits_to_masks(blocks::u16_at(p + 2 * i)).v, vdupq_n_u8(16)));
  });
}
inline u32x16 load_halves(const std::uint8_t* p) {
  return each_word([=](int i) { return vmovl_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i))); });
}
inline f32x16 load_bf16(const std::uint8_t* p) {
  return each(
      [=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16)); });
}

struct i32x16 {
  int32x4_t v[4];
};
template <class F>
inline i32x16 each_i32(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline i32x16 set1_i32(std::int32_t x) {
  return each_i32([=](int) { return vdupq_n_s32(x); });
}
inline i32x16 operator+(i32x16 a, i32x16 b) {
  return each_i32([=](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
template <int N>
inline i32x16 over_power(i32x16 a) {
  if constexpr (N == 0) {
    return a;
  } else {
    return each_i32([=](int i) { return vshrq_n_s32(a.v[i], N); });
  }
}
inline f32x16 to_f32(i32x16 a) {
  return each([=](int i) { return vcvtq_f32_s32(a.v[i]); });
}
inline i32x16 to_nearest(f32x16 a) {
  return each_i32([=](int i) { return vcvtnq_s32_f32(a.v[i]); });
}
inline std::int32_t sum_lanes(i32x16 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
inline std::uint32_t largest_bits(f32x16 a, f32x16 b) {
  uint32x4_t largest = vdupq_n_u32(0);
  for (int i = 0; i < 4; ++i) {
    const uint32x4_t of_a = vreinterpretq_u32_f32(vabsq_f32(a.v[i]));
    largest = vmaxq_u32(largest, vmaxq_u32(of_a, vreinterpretq_u32_f32(vabsq_f32(b.v[i]))));
  }
  return vmaxvq_u32(largest);
}
#if defined(__ARM_FEATURE_DOTPROD)
// Low digits of two words, then their high ones.
inline void store_digits(ActDigits& x, i32x16 a, i32x16 b) {
  const auto eight = [](std::int32_t* to, int32x4_t p, int32x4_t q) {
    const int16x8_t halves = vcombine_s16(vmovn_s32(p), vmovn_s32(q));
    vst1q_s8(reinterpret_cast<std::int8_t*>(to), vcombine_s8(vmovn_s16(halves), vrshrn_n_s16(halves, 8)));
  };
  eight(x.words, a.v[0], a.v[1]);
  eight(x.words + 4, a.v[2], a.v[3]);
  eight(x.words + 8, b.v[0], b.v[1]);
  eight(x.words + 12, b.v[2], b.v[3]);
}
#else
// Columns 0 and 2, then 1 and 3 of every word.
inline void store_digits(ActDigits& x, i32x16 a, i32x16 b) {
  const auto four = [](std::int32_t* to, int32x4_t q) {
    vst1_s32(to, vsli_n_s32(vget_low_s32(q), vget_high_s32(q), 16));
  };
  for (int i = 0; i < 4; ++i) four(x.words + 2 * i, a.v[i]), four(x.words + 8 + 2 * i, b.v[i]);
}
#endif

// Sums as cpu/words.h describes them.
#if !defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8)
struct Sums {
  int32x4_t v[8];  // two numbers for row 2 i, two for row 2 i + 1
};
inline Sums start(std::int32_t first) {
  const int32x4_t v = vreinterpretq_s32_u64(vdupq_n_u64(static_cast<std::uint32_t>(first)));
  return {{v, v, v, v, v, v, v, v}};
}
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
// Two rows of eight columns times the low and the high digits of these columns.
constexpr int kStep = 2;
constexpr bool kSignedCodes = false;
struct Codes {
  uint8x16_t v[8];
};
inline Codes load_codes(const std::uint8_t* p) {
  Codes c;
  for (int i = 0; i < 8; ++i) c.v[i] = vld1q_u8(p + 16 * i);
  return c;
}
template <int N>
inline Codes lowered(const Codes& a) {
  Codes c = a;
  if constexpr (N > 0) {
    for (uint8x16_t& v : c.v) v = vshrq_n_u8(v, N);
  }
  return c;
}
inline Codes side_by_side(u32x16 a, u32x16 b) {
  Codes c;
  for (int i = 0; i < 4; ++i) {
    c.v[2 * i] = vreinterpretq_u8_u32(vzip1q_u32(a.v[i], b.v[i]));
    c.v[2 * i + 1] = vreinterpretq_u8_u32(vzip2q_u32(a.v[i], b.v[i]));
  }
  return c;
}
template <int W>
inline void accumulate(Sums& s, const Codes& codes, const ActDigits& x) {
  const int8x16_t digits = vld1q_s8(reinterpret_cast<const std::int8_t*>(x.words + 2 * W));
  for (int i = 0; i < 8; ++i) s.v[i] = vusmmlaq_s32(s.v[i], codes.v[i], digits);
}
inline i32x16 total(const Sums& s) {
  const int32x4_t places = vreinterpretq_s32_u64(vdupq_n_u64(std::uint64_t{8} << 32));
  return each_i32(
      [&](int i) { return vpaddq_s32(vshlq_s32(s.v[2 * i], places), vshlq_s32(s.v[2 * i + 1], places)); });
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kStep = 1;
constexpr bool kSignedCodes = true;
using Codes = u32x16;
template <int N>
inline Codes lowered(const Codes& a) {
  return shift_right<N>(a);
}
inline Codes load_codes(const std::uint8_t* p) { return load_words(p); }
struct Sums {
  i32x16 high, low;
};
inline Sums start(std::int32_t low) { return {set1_i32(0), set1_i32(low)}; }
template <int W>
inline void accumulate(Sums& s, const Codes& codes, const ActDigits& x) {
  const int8x16_t digits = vld1q_s8(reinterpret_cast<const std::int8_t*>(x.words + W / 2 * 4));
  for (int i = 0; i < 4; ++i) {
    const int8x16_t c = vreinterpretq_s8_u32(codes.v[i]);
    s.low.v[i] = vdotq_laneq_s32(s.low.v[i], c, digits, W % 2);
    s.high.v[i] = vdotq_laneq_s32(s.high.v[i], c, digits, 2 + W % 2);
  }
}
inline i32x16 total(const Sums& s) {
  return each_i32([&](int i) { return vaddq_s32(vshlq_n_s32(s.high.v[i], 8), s.low.v[i]); });
}
#else
// Columns 0 and 2, and columns 1 and 3: even and odd ones are added at the end.
constexpr int kStep = 1;
constexpr bool kSignedCodes = false;
using Codes = u32x16;
template <int N>
inline Codes lowered(const Codes& a) {
  return shift_right<N>(a);
}
inline Codes load_codes(const std::uint8_t* p) { return load_words(p); }
template <int W>
inline void accumulate(Sums& s, const Codes& codes, const ActDigits& x) {
  const auto add = [&s](int i, uint16x8_t halves, std::int32_t pair) {
    const int16x8_t c = vreinterpretq_s16_u16(halves), d = vreinterpretq_s16_s32(vdupq_n_s32(pair));
    s.v[2 * i] = vmlal_s16(s.v[2 * i], vget_low_s16(c), vget_low_s16(d));
    s.v[2 * i + 1] = vmlal_high_s16(s.v[2 * i + 1], c, d);
  };
  for (int i = 0; i < 4; ++i) {
    const uint16x8_t c = vreinterpretq_u16_u32(codes.v[i]);
    add(i, vandq_u16(c, vdupq_n_u16(0xff)), x.words[2 * W]);
    add(i, vshrq_n_u16(c, 8), x.words[2 * W + 1]);
  }
}
inline i32x16 total(const Sums& s) {
  return each_i32([&](int i) { return vpaddq_s32(s.v[2 * i], s.v[2 * i + 1]); });
}
#endif
inline void store_codes(std::uint8_t* p, const Codes& c) { std::memcpy(p, &c, sizeof c); }

}  // namespace
}  // namespace ringlm::cpu

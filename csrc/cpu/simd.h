// Sixteen floats, and sixteen bytes, on every instruction set: for the floats one AVX-512 register, two of
// AVX, four of NEON, or an array.
//
// The lanes mean the same everywhere and multiply-add is written out, so that the order of every sum is fixed
// by the code that uses it. Internal linkage: each instruction set's translation unit has its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "gguf/half.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ringlm::cpu {
namespace {

constexpr int kLanes = 16;

#if defined(__AVX2__) || defined(__AVX512F__)
// Sixteen bytes.
struct u8x16 {
  __m128i v;
};
inline u8x16 load_u8(const std::uint8_t* p) { return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))}; }
inline u8x16 set1_u8(int x) { return {_mm_set1_epi8(static_cast<char>(x))}; }
inline u8x16 operator&(u8x16 a, u8x16 b) { return {_mm_and_si128(a.v, b.v)}; }
inline u8x16 operator|(u8x16 a, u8x16 b) { return {_mm_or_si128(a.v, b.v)}; }
inline u8x16 shift_right(u8x16 a, int n) {
  return {_mm_srl_epi16(a.v, _mm_cvtsi32_si128(n))};
}  // across byte borders: mask the result
inline u8x16 shift_left(u8x16 a, int n) { return {_mm_sll_epi16(a.v, _mm_cvtsi32_si128(n))}; }
// Byte j is table[index[j]], for indices below 16.
inline u8x16 look_up(u8x16 table, u8x16 index) { return {_mm_shuffle_epi8(table.v, index.v)}; }
// Byte j is 0xff where bit j is set, else 0.
inline u8x16 bits_to_masks(std::uint32_t bits) {
  const __m128i spread =
      _mm_shuffle_epi8(_mm_cvtsi32_si128(static_cast<int>(bits)), _mm_set_epi64x(0x0101010101010101, 0));
  const __m128i one = _mm_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
  return {_mm_cmpeq_epi8(_mm_and_si128(spread, one), one)};
}
#endif

#if defined(__AVX512F__)

struct f32x16 {
  __m512 v;
};
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
inline f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The larger, or x where x is NaN.
inline f32x16 at_least(f32x16 x, f32x16 low) { return {_mm512_max_ps(low.v, x.v)}; }
inline f32x16 at_most(f32x16 x, f32x16 high) { return {_mm512_min_ps(high.v, x.v)}; }
inline f32x16 round(f32x16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for integers n in [-126, 127]
inline f32x16 exp2_integer(f32x16 n) {
  const __m512i bits =
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return {_mm512_castsi512_ps(bits)};
}
inline f32x16 load_f16(const std::uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline f32x16 to_f32(u8x16 a) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a.v))}; }
inline f32x16 signed_to_f32(u8x16 a) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a.v))}; }

#elif defined(__AVX2__)

struct f32x16 {
  __m256 lo, hi;
};
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
inline f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 at_least(f32x16 x, f32x16 low) {
  return {_mm256_max_ps(low.lo, x.lo), _mm256_max_ps(low.hi, x.hi)};
}
inline f32x16 at_most(f32x16 x, f32x16 high) {
  return {_mm256_min_ps(high.lo, x.lo), _mm256_min_ps(high.hi, x.hi)};
}
inline f32x16 round(f32x16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline f32x16 exp2_integer(f32x16 n) {
  const auto half = [](__m256 x) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
  };
  return {half(n.lo), half(n.hi)};
}
inline f32x16 load_f16(const std::uint8_t* p) {
  const auto half = [](const std::uint8_t* q) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  };
  return {half(p), half(p + 16)};
}

inline f32x16 to_f32(u8x16 a) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a.v)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(a.v, 8)))};
}
inline f32x16 signed_to_f32(u8x16 a) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a.v)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(a.v, 8)))};
}

#elif defined(__aarch64__)

struct f32x16 {
  float32x4_t v[4];
};
template <class F>
inline f32x16 each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline f32x16 load(const float* p) {
  return each([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, f32x16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline f32x16 set1(float x) {
  return each([=](int) { return vdupq_n_f32(x); });
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
  return each([=](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
  return each([=](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
  return each([=](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
  return each([=](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return each([=](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline f32x16 at_least(f32x16 x, f32x16 low) {
  return each([=](int i) { return vmaxq_f32(low.v[i], x.v[i]); });
}
inline f32x16 at_most(f32x16 x, f32x16 high) {
  return each([=](int i) { return vminq_f32(high.v[i], x.v[i]); });
}
inline f32x16 round(f32x16 a) {
  return each([=](int i) { return vrndnq_f32(a.v[i]); });
}
inline f32x16 exp2_integer(f32x16 n) {
  return each([=](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
  });
}
inline f32x16 load_f16(const std::uint8_t* p) {
  return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
}

struct u8x16 {
  uint8x16_t v;
};
inline u8x16 load_u8(const std::uint8_t* p) { return {vld1q_u8(p)}; }
inline u8x16 set1_u8(int x) { return {vdupq_n_u8(static_cast<std::uint8_t>(x))}; }
inline u8x16 operator&(u8x16 a, u8x16 b) { return {vandq_u8(a.v, b.v)}; }
inline u8x16 operator|(u8x16 a, u8x16 b) { return {vorrq_u8(a.v, b.v)}; }
inline u8x16 shift_right(u8x16 a, int n) { return {vshlq_u8(a.v, vdupq_n_s8(static_cast<std::int8_t>(-n)))}; }
inline u8x16 shift_left(u8x16 a, int n) { return {vshlq_u8(a.v, vdupq_n_s8(static_cast<std::int8_t>(n)))}; }
inline u8x16 look_up(u8x16 table, u8x16 index) { return {vqtbl1q_u8(table.v, index.v)}; }
inline u8x16 bits_to_masks(std::uint32_t bits) {
  const uint8x8_t one = vcreate_u8(0x8040201008040201ull);
  const auto half = [&](std::uint32_t b) { return vtst_u8(vdup_n_u8(static_cast<std::uint8_t>(b)), one); };
  return {vcombine_u8(half(bits), half(bits >> 8))};
}
inline f32x16 to_f32(u8x16 a) {
  return each([=](int i) {
    const uint16x8_t wide = i < 2 ? vmovl_u8(vget_low_u8(a.v)) : vmovl_u8(vget_high_u8(a.v));
    return vcvtq_f32_u32(vmovl_u16(i % 2 == 0 ? vget_low_u16(wide) : vget_high_u16(wide)));
  });
}
inline f32x16 signed_to_f32(u8x16 a) {
  const int8x16_t s = vreinterpretq_s8_u8(a.v);
  return each([=](int i) {
    const int16x8_t wide = i < 2 ? vmovl_s8(vget_low_s8(s)) : vmovl_s8(vget_high_s8(s));
    return vcvtq_f32_s32(vmovl_s16(i % 2 == 0 ? vget_low_s16(wide) : vget_high_s16(wide)));
  });
}

#else

struct f32x16 {
  float v[kLanes];
};
template <class F>
inline f32x16 each(F f) {
  f32x16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline f32x16 load(const float* p) {
  return each([=](int i) { return p[i]; });
}
inline void store(float* p, f32x16 a) { std::memcpy(p, a.v, sizeof a.v); }
inline f32x16 set1(float x) {
  return each([=](int) { return x; });
}
inline f32x16 operator+(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline f32x16 at_least(f32x16 x, f32x16 low) {
  return each([&](int i) { return x.v[i] < low.v[i] ? low.v[i] : x.v[i]; });
}
inline f32x16 at_most(f32x16 x, f32x16 high) {
  return each([&](int i) { return x.v[i] > high.v[i] ? high.v[i] : x.v[i]; });
}
inline f32x16 round(f32x16 a) {
  constexpr float big = 12582912.0f;  // 1.5 * 2^23: adding it leaves no bits for a fraction; |a| < 2^22 here
  return each([&](int i) { return (a.v[i] + big) - big; });
}
inline f32x16 exp2_integer(f32x16 n) {
  return each([&](int i) {
    if (n.v[i] != n.v[i]) return n.v[i];  // NaN has no integer
    return from_bits(static_cast<std::uint32_t>(static_cast<std::int32_t>(n.v[i]) + 127) << 23);
  });
}
inline f32x16 load_f16(const std::uint8_t* p) {
  return each([=](int i) {
    std::uint16_t h;
    std::memcpy(&h, p + 2 * i, sizeof h);
    return f16_to_f32(h);
  });
}

struct u8x16 {
  std::uint8_t v[kLanes];
};
template <class F>
inline u8x16 each_u8(F f) {
  u8x16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<std::uint8_t>(f(i));
  return r;
}
inline u8x16 load_u8(const std::uint8_t* p) {
  return each_u8([=](int i) { return p[i]; });
}
inline u8x16 set1_u8(int x) {
  return each_u8([=](int) { return x; });
}
inline u8x16 operator&(u8x16 a, u8x16 b) {
  return each_u8([&](int i) { return a.v[i] & b.v[i]; });
}
inline u8x16 operator|(u8x16 a, u8x16 b) {
  return each_u8([&](int i) { return a.v[i] | b.v[i]; });
}
inline u8x16 shift_right(u8x16 a, int n) {
  return each_u8([&](int i) { return a.v[i] >> n; });
}
inline u8x16 shift_left(u8x16 a, int n) {
  return each_u8([&](int i) { return a.v[i] << n; });
}
inline u8x16 look_up(u8x16 table, u8x16 index) {
  return each_u8([&](int i) { return table.v[index.v[i]]; });
}
inline u8x16 bits_to_masks(std::uint32_t bits) {
  return each_u8([=](int i) { return 0u - ((bits >> i) & 1u); });
}
inline f32x16 to_f32(u8x16 a) {
  return each([&](int i) { return static_cast<float>(a.v[i]); });
}
inline f32x16 signed_to_f32(u8x16 a) {
  return each([&](int i) { return static_cast<float>(static_cast<std::int8_t>(a.v[i])); });
}

#endif

// Sum of the lanes, halves folded onto each other: one order for every instruction set.
#if defined(__AVX2__) || defined(__AVX512F__)
inline float reduce_add(f32x16 a) {
#if defined(__AVX512F__)
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
#else
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#elif defined(__aarch64__)
inline float reduce_add(f32x16 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
#else
inline float reduce_add(f32x16 a) {
  float t[kLanes];
  store(t, a);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) t[i] += t[i + half];
  }
  return t[0];
}
#endif

// e^x to about 2 units in the last place for x in [-87, 88]; clamped outside, NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor series to r^7, whose remainder is below 2^-27.
inline f32x16 exp(f32x16 x) {
  x = at_most(at_least(x, set1(-87.0f)), set1(88.0f));
  const f32x16 n = round(x * set1(1.44269504f));
  f32x16 r = fma(n, set1(-0.693359375f), x);  // ln 2 in two parts, the first exact in few bits
  r = fma(n, set1(2.12194440e-4f), r);
  constexpr float coefficients[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f,
                                    0.5f,          1.0f,          1.0f};
  f32x16 p = set1(1.0f / 5040.0f);
  for (const float c : coefficients) p = fma(p, r, set1(c));
  return p * exp2_integer(n);
}

// cap tanh(x / cap), with tanh y = 1 - 2 / (e^(2 y) + 1). NaN for what is not finite, which must not look as
// if it were.
inline f32x16 soft_capped(f32x16 x, float cap) {
  const f32x16 power = exp(x * set1(2.0f / cap));
  return fma(x, set1(0.0f), set1(cap) - set1(2.0f * cap) / (power + set1(1.0f)));
}

}  // namespace
}  // namespace ringlm::cpu

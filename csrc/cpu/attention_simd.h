// What attention needs besides simd.h and words.h: products of two words, maxima, transposition.
#pragma once

#include "cpu/words.h"

namespace ringlm::cpu {
namespace {

#if defined(__AVX512F__)

inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline void store_low_bytes(std::uint8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
// sum + the sum of the four products of each lane, unsigned times signed bytes.
inline i32x16 dot4(i32x16 sum, u32x16 u, u32x16 s) { return {_mm512_dpbusd_epi32(sum.v, u.v, s.v)}; }
inline f32x16 larger(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float reduce_max(f32x16 a) { return _mm512_reduce_max_ps(a.v); }
// Lanes [begin, end) of a, and `other` in the rest.
inline f32x16 keep(f32x16 a, int begin, int end, float other) {
  const auto lanes = static_cast<__mmask16>((0xffffu << begin) & (0xffffu >> (kLanes - end)));
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), lanes, a.v)};
}

#elif defined(__AVX2__)

inline i32x16 operator-(i32x16 a, i32x16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
inline void store_low_bytes(std::uint8_t* p, i32x16 a) {
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(a.lo, low), _mm256_and_si256(a.hi, low));
  const __m256i in_order = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(in_order), _mm256_extracti128_si256(in_order, 1)));
}
inline i32x16 dot4(i32x16 sum, u32x16 u, u32x16 s) {
#if defined(__AVXVNNI__)
  return {_mm256_dpbusd_avx_epi32(sum.lo, u.lo, s.lo), _mm256_dpbusd_avx_epi32(sum.hi, u.hi, s.hi)};
#else
  // In halves of words: a sum of two products of bytes does not fit sixteen bits.
  const auto half = [](__m256i c, __m256i a, __m256i b) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(c, _mm256_add_epi32(even, odd));
  };
  return {half(sum.lo, u.lo, s.lo), half(sum.hi, u.hi, s.hi)};
#endif
}
inline f32x16 larger(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }

#elif defined(__aarch64__)

inline i32x16 operator-(i32x16 a, i32x16 b) {
  return each_i32([=](int i) { return vsubq_s32(a.v[i], b.v[i]); });
}
inline i32x16 times_256(i32x16 a) {
  return each_i32([=](int i) { return vshlq_n_s32(a.v[i], 8); });
}
inline void store_low_bytes(std::uint8_t* p, i32x16 a) {
  const auto words = [&](int i) { return vcombine_s16(vmovn_s32(a.v[i]), vmovn_s32(a.v[i + 1])); };
  vst1q_s8(reinterpret_cast<std::int8_t*>(p), vcombine_s8(vmovn_s16(words(0)), vmovn_s16(words(2))));
}
inline i32x16 dot4(i32x16 sum, u32x16 u, u32x16 s) {
  return each_i32([=](int i) {
    const uint8x16_t a = vreinterpretq_u8_u32(u.v[i]);
    const int8x16_t b = vreinterpretq_s8_u32(s.v[i]);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum.v[i], a, b);
#elif defined(__ARM_FEATURE_DOTPROD)
    // (u - 128) s + 64 s + 64 s
    const int8x16_t c = vreinterpretq_s8_u8(veorq_u8(a, vdupq_n_u8(128))), half = vdupq_n_s8(64);
    return vdotq_s32(vdotq_s32(vdotq_s32(sum.v[i], c, b), half, b), half, b);
#else
    const auto pairs = [](uint8x8_t x, int8x8_t y) {  // sums of two products
      const int16x8_t wide = vreinterpretq_s16_u16(vmovl_u8(x)), other = vmovl_s8(y);
      return vpaddq_s32(vmull_s16(vget_low_s16(wide), vget_low_s16(other)),
                        vmull_s16(vget_high_s16(wide), vget_high_s16(other)));
    };
    return vaddq_s32(
        sum.v[i], vpaddq_s32(pairs(vget_low_u8(a), vget_low_s8(b)), pairs(vget_high_u8(a), vget_high_s8(b))));
#endif
  });
}
inline f32x16 larger(f32x16 a, f32x16 b) {
  return each([=](int i) { return vmaxq_f32(a.v[i], b.v[i]); });
}

#else

inline i32x16 operator-(i32x16 a, i32x16 b) {
  return each_i32(
      [&](int i) { return add(a.v[i], static_cast<std::int32_t>(0u - static_cast<std::uint32_t>(b.v[i]))); });
}
inline i32x16 times_256(i32x16 a) {
  return each_i32([&](int i) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(a.v[i]) << 8); });
}
inline void store_low_bytes(std::uint8_t* p, i32x16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::uint8_t>(a.v[i]);
}
inline i32x16 dot4(i32x16 sum, u32x16 u, u32x16 s) {
  return each_i32([&](int i) {
    std::int32_t all = sum.v[i];
    for (int shift = 0; shift < 32; shift += 8) {
      const auto code = static_cast<std::int32_t>(u.v[i] >> shift & 255u);
      all = add(all, code * static_cast<std::int8_t>(s.v[i] >> shift));
    }
    return all;
  });
}
inline f32x16 larger(f32x16 a, f32x16 b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}

#endif

#if !defined(__AVX512F__)
inline float reduce_max(f32x16 a) {
  float t[kLanes];
  store(t, a);
  float most = t[0];
  for (const float x : t) most = x > most ? x : most;
  return most;
}
inline f32x16 keep(f32x16 a, int begin, int end, float other) {
  float t[kLanes];
  store(t, a);
  for (int i = 0; i < kLanes; ++i) t[i] = i >= begin && i < end ? t[i] : other;
  return load(t);
}
#endif

// x 2^n for integers n in [-126, 127]
#if defined(__AVX512F__)
inline f32x16 times_exp2(f32x16 x, f32x16 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
#else
inline f32x16 times_exp2(f32x16 x, f32x16 n) { return x * exp2_integer(n); }
#endif

// e^x for x <= 0 as exp() has it, in fewer steps: e^r is 1 + a polynomial fitted for the least relative error
// (2e-9) over |r| <= ln 2 / 2.
inline f32x16 exp_negative(f32x16 x) {
  const f32x16 big = set1(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  x = at_least(x, set1(-87.0f));
  const f32x16 n = fma(x, set1(1.44269504f), big) - big;
  f32x16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  constexpr float coefficients[] = {0.008374196f, 0.041668005f, 0.1666643f, 0.49999994f, 1.0f, 1.0f};
  f32x16 p = set1(0.0013843606f);
  for (const float c : coefficients) p = fma(p, r, set1(c));
  return times_exp2(p, n);
}

// Sixteen rows of sixteen 32-bit elements, row(i) + at: element j of row i goes to out[j * stride + i].
#if defined(__AVX512F__)
template <class Rows>
inline void transpose(Rows row, std::size_t at, std::uint32_t* out, std::size_t stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(row(i) + at);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // lane l of a[i + j]: column 4 l + j of rows i to i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  const auto column = [=](int j) { return out + static_cast<std::size_t>(j) * stride; };
  for (int j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i even2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i odd2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(column(j), _mm512_shuffle_i32x4(even, even2, 0x88));
    _mm512_storeu_si512(column(4 + j), _mm512_shuffle_i32x4(odd, odd2, 0x88));
    _mm512_storeu_si512(column(8 + j), _mm512_shuffle_i32x4(even, even2, 0xdd));
    _mm512_storeu_si512(column(12 + j), _mm512_shuffle_i32x4(odd, odd2, 0xdd));
  }
}
#elif defined(__AVX2__)
template <class Rows>
inline void transpose(Rows row, std::size_t at, std::uint32_t* out, std::size_t stride) {
  for (int r = 0; r < 16; r += 8) {
    for (int c = 0; c < 16; c += 8) {
      __m256i a[8], b[8];
      for (int i = 0; i < 8; ++i) {
        a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(r + i) + at + 4 * c));
      }
      for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
      }
      const auto put = [=](int j, __m256i column) {
        std::uint32_t* to = out + static_cast<std::size_t>(c + j) * stride + r;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), column);
      };
      for (int j = 0; j < 4; ++j) {
        put(j, _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
        put(4 + j, _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
      }
    }
  }
}
#elif defined(__aarch64__)
template <class Rows>
inline void transpose(Rows row, std::size_t at, std::uint32_t* out, std::size_t stride) {
  for (int r = 0; r < 16; r += 4) {
    for (int c = 0; c < 16; c += 4) {
      uint32x4_t a[4];
      for (int i = 0; i < 4; ++i) a[i] = vreinterpretq_u32_u8(vld1q_u8(row(r + i) + at + 4 * c));
      const uint32x4_t even = vtrn1q_u32(a[0], a[1]), odd = vtrn2q_u32(a[0], a[1]);
      const uint32x4_t even2 = vtrn1q_u32(a[2], a[3]), odd2 = vtrn2q_u32(a[2], a[3]);
      const auto put = [=](int j, uint32x2_t lo, uint32x2_t hi) {
        vst1q_u32(out + static_cast<std::size_t>(c + j) * stride + r, vcombine_u32(lo, hi));
      };
      put(0, vget_low_u32(even), vget_low_u32(even2));
      put(1, vget_low_u32(odd), vget_low_u32(odd2));
      put(2, vget_high_u32(even), vget_high_u32(even2));
      put(3, vget_high_u32(odd), vget_high_u32(odd2));
    }
  }
}
#else
template <class Rows>
inline void transpose(Rows row, std::size_t at, std::uint32_t* out, std::size_t stride) {
  for (int i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 16; ++j) std::memcpy(out + j * stride + i, row(i) + at + 4 * j, 4);
  }
}
#endif

#if defined(__AVX512F__)
// Thirty-two rows of sixteen 16-bit elements: element j of row i goes to out[j * stride + i].
template <class Rows>
inline void transpose_u16(Rows row, std::size_t at, std::uint16_t* out, std::size_t stride) {
  const auto half = [=](int i) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row(i) + at)); };
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) {
    const int r = i < 8 ? i : i + 8;
    a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(half(r)), half(r + 8), 1);
  }
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + j]: columns 2 j and 2 j + 1 of each half
    a[i] = _mm512_unpacklo_epi32(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi32(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi32(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi32(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 4; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 4 + j]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 4 + j]);
    }
  }
  for (int j = 0; j < 8; ++j) {
    std::uint16_t* to = out + static_cast<std::size_t>(j) * stride;
    _mm512_storeu_si512(to, _mm512_shuffle_i64x2(b[j], b[8 + j], 0x88));
    _mm512_storeu_si512(to + 8 * stride, _mm512_shuffle_i64x2(b[j], b[8 + j], 0xdd));
  }
}
#endif

// Sixty-four columns of four rows of bytes: a column becomes one element of out. Where kLaced, the quarters
// of every 64 elements are out of order: column 16 l + 4 j + e lies at 16 j + 4 l + e.
#if defined(__AVX512F__)
constexpr bool kLaced = true;
template <class Rows>
inline void interleave(Rows row, std::size_t at, std::uint32_t* out, std::uint32_t flip) {
  const auto flipped = [=](int i) {
    return _mm512_xor_si512(_mm512_loadu_si512(row(i) + at), _mm512_set1_epi32(static_cast<int>(flip)));
  };
  const __m512i r0 = flipped(0), r1 = flipped(1), r2 = flipped(2), r3 = flipped(3);
  const __m512i lo = _mm512_unpacklo_epi8(r0, r1), hi = _mm512_unpackhi_epi8(r0, r1);
  const __m512i lo2 = _mm512_unpacklo_epi8(r2, r3), hi2 = _mm512_unpackhi_epi8(r2, r3);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi16(lo, lo2));
  _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi16(lo, lo2));
  _mm512_storeu_si512(out + 32, _mm512_unpacklo_epi16(hi, hi2));
  _mm512_storeu_si512(out + 48, _mm512_unpackhi_epi16(hi, hi2));
}
// Brings 64 elements in order.
inline void unlace(float* x) {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16), c = _mm512_loadu_ps(x + 32),
               d = _mm512_loadu_ps(x + 48);
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x88), ab2 = _mm512_shuffle_f32x4(a, b, 0xdd);
  const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x88), cd2 = _mm512_shuffle_f32x4(c, d, 0xdd);
  _mm512_storeu_ps(x, _mm512_shuffle_f32x4(ab, cd, 0x88));
  _mm512_storeu_ps(x + 16, _mm512_shuffle_f32x4(ab2, cd2, 0x88));
  _mm512_storeu_ps(x + 32, _mm512_shuffle_f32x4(ab, cd, 0xdd));
  _mm512_storeu_ps(x + 48, _mm512_shuffle_f32x4(ab2, cd2, 0xdd));
}
#else
constexpr bool kLaced = false;
inline void unlace(float*) {}
template <class Rows>
inline void interleave(Rows row, std::size_t at, std::uint32_t* out, std::uint32_t flip) {
  for (std::size_t i = 0; i < 64; i += 16) {
    const std::size_t from = at + i;
#if defined(__AVX2__)
    const auto flipped = [=](int r) {
      return _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row(r) + from)),
                           _mm_set1_epi32(static_cast<int>(flip)));
    };
    const __m128i r0 = flipped(0), r1 = flipped(1), r2 = flipped(2), r3 = flipped(3);
    const __m128i lo = _mm_unpacklo_epi8(r0, r1), hi = _mm_unpackhi_epi8(r0, r1);
    const __m128i lo2 = _mm_unpacklo_epi8(r2, r3), hi2 = _mm_unpackhi_epi8(r2, r3);
    auto* to = reinterpret_cast<__m128i*>(out + i);
    _mm_storeu_si128(to, _mm_unpacklo_epi16(lo, lo2));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi16(lo, lo2));
    _mm_storeu_si128(to + 2, _mm_unpacklo_epi16(hi, hi2));
    _mm_storeu_si128(to + 3, _mm_unpackhi_epi16(hi, hi2));
#elif defined(__aarch64__)
    const uint8x16_t sign = vreinterpretq_u8_u32(vdupq_n_u32(flip));
    uint8x16x4_t four;
    for (int r = 0; r < 4; ++r) four.val[r] = veorq_u8(vld1q_u8(row(r) + from), sign);
    vst4q_u8(reinterpret_cast<std::uint8_t*>(out + i), four);
#else
    for (std::size_t j = 0; j < 16; ++j) {
      std::uint32_t element = 0;
      for (int r = 0; r < 4; ++r) {
        element |= static_cast<std::uint32_t>(row(r)[from + j]) << (8 * r);  // as a little-endian load would
      }
      element ^= flip;
      std::memcpy(out + i + j, &element, sizeof element);
    }
#endif
  }
}
#endif

}  // namespace
}  // namespace ringlm::cpu

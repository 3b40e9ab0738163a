// Sixteen 32-bit words, one for each row of a group, and the dot products of the codes in them.
//
// A word holds the codes of four neighbouring columns in its bytes. Integer sums are exact, so every
// instruction set finds the same ones. Internal linkage, as simd.h.
#pragma once

#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "gguf/blocks.h"

#if defined(__aarch64__)
#include "cpu/words_neon.h"
#endif

namespace ringlm::cpu {
namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define RINGLM_TWO_DIGITS 1  // products of bytes; else of 16-bit halves
#else
#define RINGLM_TWO_DIGITS 0
#endif

#if defined(__AVX512F__)

struct u32x16 {
  __m512i v;
};
inline u32x16 load_words(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline u32x16 set1_u32(std::uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
inline u32x16 operator&(u32x16 a, u32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline u32x16 operator|(u32x16 a, u32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline u32x16 operator^(u32x16 a, u32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
inline u32x16 shift_right(u32x16 a) {
  return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
inline u32x16 shift_left(u32x16 a) {
  return {_mm512_slli_epi32(a.v, N)};
}
// Byte N of each word, as a signed number.
template <int N>
inline f32x16 signed_byte(u32x16 a) {
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a.v, 24 - 8 * N), 24))};
}
inline f32x16 to_f32(u32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }  // below 2^31
// Each byte, 0 to 15, replaced by table[byte].
inline u32x16 lookup(u8x16 table, u32x16 a) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table.v), a.v)};
}
// Byte j is 16 where bit j of the 64 at p is set, else 0.
inline u32x16 sixteens(const std::uint8_t* p) {
  std::uint64_t bits;
  std::memcpy(&bits, p, sizeof bits);
  return {_mm512_maskz_mov_epi8(static_cast<__mmask64>(bits), _mm512_set1_epi8(16))};
}
// Sixteen 16-bit numbers.
inline u32x16 load_halves(const std::uint8_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline f32x16 load_bf16(const std::uint8_t* p) {
  return {_mm512_castsi512_ps(shift_left<16>(load_halves(p)).v)};
}

// Each byte minus n.
inline u32x16 minus_bytes(u32x16 a, int n) {
  return {_mm512_sub_epi8(a.v, _mm512_set1_epi8(static_cast<char>(n)))};
}

struct i32x16 {
  __m512i v;
};
inline i32x16 set1_i32(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 times_256(i32x16 a) { return {_mm512_slli_epi32(a.v, 8)}; }
template <int N>
inline i32x16 over_power(i32x16 a) {  // a / 2^N, rounded down
  return {_mm512_srai_epi32(a.v, N)};
}
inline f32x16 to_f32(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline i32x16 to_nearest(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline std::int32_t sum_lanes(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
// The largest magnitude as its bits, of which NaN has the most.
inline std::uint32_t largest_bits(f32x16 a, f32x16 b) {
  const __m512i m =
      _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(a.v)), _mm512_castps_si512(_mm512_abs_ps(b.v)));
  return _mm512_reduce_max_epu32(m);
}
// sum += codes (unsigned) times four s8 digits, which lie in one word. GCC makes two instructions of the
// intrinsics, and where a neighbour has half of the core's decoder, the number of instructions is the limit.
inline i32x16 dot4(i32x16 sum, u32x16 codes, const std::int32_t& digits) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.v) : "v"(codes.v), "m"(digits));
  return sum;
}
inline void store_digits(ActDigits& x, i32x16 a, i32x16 b) {
  auto* to = reinterpret_cast<__m128i*>(x.words);
  const __m512i half = _mm512_set1_epi32(128);
  _mm_store_si128(to, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(a.v, half), 8)));
  _mm_store_si128(to + 1, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_add_epi32(b.v, half), 8)));
  _mm_store_si128(to + 2, _mm512_cvtepi32_epi8(a.v));
  _mm_store_si128(to + 3, _mm512_cvtepi32_epi8(b.v));
}

#elif defined(__AVX2__)

struct u32x16 {
  __m256i lo, hi;
};
template <class F>
inline u32x16 halves(F f) {
  return {f(0), f(1)};
}
inline u32x16 load_words(const std::uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline u32x16 set1_u32(std::uint32_t x) {
  const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
  return {v, v};
}
inline u32x16 operator&(u32x16 a, u32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
inline u32x16 operator|(u32x16 a, u32x16 b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
inline u32x16 operator^(u32x16 a, u32x16 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
template <int N>
inline u32x16 shift_right(u32x16 a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
template <int N>
inline u32x16 shift_left(u32x16 a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
inline f32x16 to_f32(u32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
template <int N>
inline f32x16 signed_byte(u32x16 a) {
  const auto half = [](__m256i x) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * N), 24));
  };
  return {half(a.lo), half(a.hi)};
}
inline u32x16 lookup(u8x16 table, u32x16 a) {
  const __m256i t = _mm256_broadcastsi128_si256(table.v);
  return {_mm256_shuffle_epi8(t, a.lo), _mm256_shuffle_epi8(t, a.hi)};
}
inline u32x16 sixteens(const std::uint8_t* p) {
  const auto half = [](const std::uint8_t* bits) {
    const __m256i spread =
        _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(blocks::u32_at(bits))),
                            _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0));
    const __m256i one = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(spread, one), one), _mm256_set1_epi8(16));
  };
  return {half(p), half(p + 4)};
}
inline u32x16 load_halves(const std::uint8_t* p) {
  const auto half = [](const std::uint8_t* q) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  };
  return {half(p), half(p + 16)};
}
inline f32x16 load_bf16(const std::uint8_t* p) {
  const u32x16 bits = shift_left<16>(load_halves(p));
  return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)};
}

struct i32x16 {
  __m256i lo, hi;
};
inline i32x16 set1_i32(std::int32_t x) {
  const __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
inline i32x16 operator+(i32x16 a, i32x16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
inline i32x16 times_256(i32x16 a) { return {_mm256_slli_epi32(a.lo, 8), _mm256_slli_epi32(a.hi, 8)}; }
template <int N>
inline i32x16 over_power(i32x16 a) {
  return {_mm256_srai_epi32(a.lo, N), _mm256_srai_epi32(a.hi, N)};
}
inline f32x16 to_f32(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline i32x16 to_nearest(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline std::int32_t sum_lanes(i32x16 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
inline std::uint32_t largest_bits(f32x16 a, f32x16 b) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const auto of = [&](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), magnitude); };
  const __m256i eight =
      _mm256_max_epu32(_mm256_max_epu32(of(a.lo), of(a.hi)), _mm256_max_epu32(of(b.lo), of(b.hi)));
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1))));
}
#if RINGLM_TWO_DIGITS
inline void store_digits(ActDigits& x, i32x16 a, i32x16 b) {
  // Packing works in halves of registers: afterwards words are in the order 0 2 4 6 1 3 5 7.
  const auto store_bytes = [](std::int32_t* to, __m256i p, __m256i q, __m256i r, __m256i s) {
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(p, q), _mm256_packs_epi32(r, s));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(mixed, order));
  };
  const auto high = [](__m256i q) {
    return _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(128)), 8);
  };
  const auto low = [](__m256i q) { return _mm256_srai_epi32(_mm256_slli_epi32(q, 24), 24); };
  store_bytes(x.words, high(a.lo), high(a.hi), high(b.lo), high(b.hi));
  store_bytes(x.words + 8, low(a.lo), low(a.hi), low(b.lo), low(b.hi));
}
inline i32x16 dot4(i32x16 sum, u32x16 codes, std::int32_t digits) {
  const __m256i d = _mm256_set1_epi32(digits);
  return {_mm256_dpbusd_avx_epi32(sum.lo, codes.lo, d), _mm256_dpbusd_avx_epi32(sum.hi, codes.hi, d)};
}
#else
// sum += pairs of halves times pairs of halves
inline i32x16 dot2(i32x16 sum, u32x16 codes, std::int32_t pair) {
  const __m256i d = _mm256_set1_epi32(pair);
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(codes.lo, d)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(codes.hi, d))};
}
inline void store_digits(ActDigits& x, i32x16 a, i32x16 b) {
  const auto sixteen = [](std::int32_t* to, __m256i p, __m256i q) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_shuffle_epi32(p, 0xd8), _mm256_shuffle_epi32(q, 0xd8));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
  };
  sixteen(x.words, a.lo, a.hi);
  sixteen(x.words + 8, b.lo, b.hi);
}
#endif

#elif !defined(__aarch64__)  // else cpu/words_neon.h

struct u32x16 {
  std::uint32_t v[kLanes];
};
template <class F>
inline u32x16 each_word(F f) {
  u32x16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<std::uint32_t>(f(i));
  return r;
}
inline u32x16 load_words(const std::uint8_t* p) {
  return each_word([=](int i) { return blocks::u32_at(p + 4 * i); });
}
inline u32x16 set1_u32(std::uint32_t x) {
  return each_word([=](int) { return x; });
}
inline u32x16 operator&(u32x16 a, u32x16 b) {
  return each_word([&](int i) { return a.v[i] & b.v[i]; });
}
inline u32x16 operator|(u32x16 a, u32x16 b) {
  return each_word([&](int i) { return a.v[i] | b.v[i]; });
}
inline u32x16 operator^(u32x16 a, u32x16 b) {
  return each_word([&](int i) { return a.v[i] ^ b.v[i]; });
}
template <int N>
inline u32x16 shift_right(u32x16 a) {
  return each_word([&](int i) { return a.v[i] >> N; });
}
template <int N>
inline u32x16 shift_left(u32x16 a) {
  return each_word([&](int i) { return a.v[i] << N; });
}
inline f32x16 to_f32(u32x16 a) {
  return each([&](int i) { return static_cast<float>(a.v[i]); });
}
template <int N>
inline f32x16 signed_byte(u32x16 a) {
  return each([&](int i) { return static_cast<float>(static_cast<std::int8_t>(a.v[i] >> (8 * N))); });
}
inline u32x16 lookup(u8x16 table, u32x16 a) {
  return each_word([&](int i) {
    std::uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
      word |= static_cast<std::uint32_t>(table.v[a.v[i] >> (8 * b) & 15]) << (8 * b);
    }
    return word;
  });
}
inline u32x16 sixteens(const std::uint8_t* p) {
  return each_word([=](int i) {
    const std::uint32_t nibble = p[i / 2] >> (4 * (i % 2)) & 15u;
    return (nibble * 0x204081u & 0x01010101u) << 4;  // a bit to each byte
  });
}
inline u32x16 load_halves(const std::uint8_t* p) {
  return each_word([=](int i) { return blocks::u16_at(p + 2 * i); });
}
inline f32x16 load_bf16(const std::uint8_t* p) {
  return each([=](int i) { return bf16_to_f32(blocks::u16_at(p + 2 * i)); });
}

struct i32x16 {
  std::int32_t v[kLanes];
};
template <class F>
inline i32x16 each_i32(F f) {
  i32x16 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline i32x16 set1_i32(std::int32_t x) {
  return each_i32([=](int) { return x; });
}
// Modulo 2^32, as vectors add.
inline std::int32_t add(std::int32_t a, std::int32_t b) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
}
inline i32x16 operator+(i32x16 a, i32x16 b) {
  return each_i32([&](int i) { return add(a.v[i], b.v[i]); });
}
template <int N>
inline i32x16 over_power(i32x16 a) {
  return each_i32([&](int i) { return a.v[i] >> N; });
}
inline f32x16 to_f32(i32x16 a) {
  return each([&](int i) { return static_cast<float>(a.v[i]); });
}
inline i32x16 dot2(i32x16 sum, u32x16 codes, std::int32_t pair) {
  const std::int32_t low = static_cast<std::int16_t>(pair), high = pair >> 16;
  return each_i32([&](int i) {
    return sum.v[i] + static_cast<std::int32_t>(codes.v[i] & 0xffff) * low +
           static_cast<std::int32_t>(codes.v[i] >> 16) * high;
  });
}

inline i32x16 to_nearest(f32x16 a) {
  const f32x16 whole = round(a);
  float f[kLanes];
  store(f, whole);
  i32x16 r;
  std::int32_t q[kLanes];
  for (int i = 0; i < kLanes; ++i) q[i] = f[i] == f[i] ? static_cast<std::int32_t>(f[i]) : 0;
  std::memcpy(&r, q, sizeof r);
  return r;
}
inline std::int32_t sum_lanes(i32x16 a) {
  std::int32_t q[kLanes], sum = 0;
  std::memcpy(q, &a, sizeof q);
  for (const std::int32_t v : q) sum += v;
  return sum;
}
inline std::uint32_t largest_bits(f32x16 a, f32x16 b) {
  float f[2 * kLanes];
  store(f, a);
  store(f + kLanes, b);
  std::uint32_t largest = 0;
  for (const float v : f) {
    const std::uint32_t bits = to_bits(v) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
inline void store_digits(ActDigits& x, i32x16 a, i32x16 b) {
  std::int32_t q[2 * kLanes];
  std::memcpy(q, &a, sizeof a);
  std::memcpy(q + kLanes, &b, sizeof b);
  const auto pair = [](std::int32_t first, std::int32_t second) {
    return static_cast<std::int32_t>((static_cast<std::uint32_t>(first) & 0xffff) |
                                     static_cast<std::uint32_t>(second) << 16);
  };
  for (int w = 0; w < 8; ++w) {
    x.words[2 * w] = pair(q[4 * w], q[4 * w + 2]);
    x.words[2 * w + 1] = pair(q[4 * w + 1], q[4 * w + 3]);
  }
}

#endif

#if !defined(__aarch64__)

// The nibbles that begin at bit N of every byte, 0 or 4.
template <int N>
inline u32x16 nibbles(u32x16 a) {
  return shift_right<N>(a) & set1_u32(0x0f0f0f0f);
}

// Sums of codes times 16-bit activations: from start(n) on, accumulate<W> adds the products with the columns
// of kStep words from word W on, and total() is one number a row. Where kSignedCodes, the products take codes
// as signed bytes. Codes may be kept in kStep * 64 bytes.
constexpr int kStep = 1;
constexpr bool kSignedCodes = false;
using Codes = u32x16;
template <int N>
inline Codes lowered(Codes a) {  // every code over 2^N
  return shift_right<N>(a);
}
inline Codes load_codes(const std::uint8_t* p) { return load_words(p); }
inline void store_codes(std::uint8_t* p, Codes a) { std::memcpy(p, &a, sizeof a); }
#if RINGLM_TWO_DIGITS
struct Sums {
  i32x16 high, low;
};
inline Sums start(std::int32_t low) { return {set1_i32(0), set1_i32(low)}; }
inline i32x16 total(const Sums& s) { return times_256(s.high) + s.low; }
template <int W>
inline void accumulate(Sums& s, Codes codes, const ActDigits& x) {
  s.high = dot4(s.high, codes, x.words[W]);
  s.low = dot4(s.low, codes, x.words[8 + W]);
}
#else
struct Sums {
  i32x16 all;
};
inline Sums start(std::int32_t first) { return {set1_i32(first)}; }
inline i32x16 total(const Sums& s) { return s.all; }
template <int W>
inline void accumulate(Sums& s, Codes codes, const ActDigits& x) {
  const u32x16 bytes = set1_u32(0x00ff00ff);
  s.all = dot2(s.all, codes & bytes, x.words[2 * W]);
  s.all = dot2(s.all, shift_right<8>(codes) & bytes, x.words[2 * W + 1]);
}
#endif
#endif

}  // namespace
}  // namespace ringlm::cpu

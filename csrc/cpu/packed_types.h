// How the codes and scales of each packed type (cpu/pack.h) are read: 32 columns of a group of rows.
//
// A weight is d * code + m, or d * (code - kZero) where a type has no minima. kScales of them cover the 32
// columns. Block layouts: gguf/blocks.h, fields in the order of pack.cpp. Group G of 32 columns of a block is
// a template argument, so that shifts are constants.
//
// codes() are times 2^kUp: bits in the middle of a byte stay where they are, since one shift of a sum is
// cheaper than one of every word.
#pragma once

#include "cpu/words.h"

namespace ringlm::cpu {
namespace {

constexpr int kScaleVector = 2 * kGroup, kWordVector = 4 * kGroup;  // bytes of a packed unit

// Signed products have no room for codes of 8 bits.
constexpr int in_place(int n) { return kSignedCodes ? 0 : n; }
template <int N>
inline u32x16 nibbles_in_place(u32x16 a) {
  if constexpr (kSignedCodes) {
    return nibbles<N>(a);
  } else {
    return a & set1_u32(0x0f0f0f0fu << N);
  }
}

// Low nibbles hold columns 0 to 15, high ones 16 to 31.
template <int W>
inline u32x16 split_nibbles(const std::uint8_t* codes) {
  const u32x16 word = load_words(codes + kWordVector * (W % 4));
  return nibbles<W / 4 * 4>(word);
}

struct PackedBlock {
  static constexpr int kColumns = 32, kScales = 1;
  template <int G, int W>
  static constexpr int kUp = 0;
  template <int G, int S>
  static f32x16 scale(const std::uint8_t* p) {
    return load_f16(p);
  }
};

struct PackedBlockWithMinima : PackedBlock {
  template <int G, int S>
  static f32x16 minimum(const std::uint8_t* p) {
    return load_f16(p + kScaleVector);
  }
};

struct PackedQ4_0 : PackedBlock {
  static constexpr int kBytes = 18, kZero = 8;
  static constexpr bool kMinima = false;
  template <int G, int W>
  static constexpr int kUp = in_place(W / 4 * 4);
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return nibbles_in_place<W / 4 * 4>(load_words(p + kScaleVector + kWordVector * (W % 4)));
  }
};

struct PackedQ4_1 : PackedBlockWithMinima {
  static constexpr int kBytes = 20, kZero = 0;
  static constexpr bool kMinima = true;
  template <int G, int W>
  static constexpr int kUp = in_place(W / 4 * 4);
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return nibbles_in_place<W / 4 * 4>(load_words(p + 2 * kScaleVector + kWordVector * (W % 4)));
  }
};

struct PackedQ5_0 : PackedBlock {
  static constexpr int kBytes = 22, kZero = 16;
  static constexpr bool kMinima = false;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return split_nibbles<W>(p + kScaleVector + kWordVector) | sixteens(p + kScaleVector + 8 * W);
  }
};

struct PackedQ5_1 : PackedBlockWithMinima {
  static constexpr int kBytes = 24, kZero = 0;
  static constexpr bool kMinima = true;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return split_nibbles<W>(p + 2 * kScaleVector + kWordVector) | sixteens(p + 2 * kScaleVector + 8 * W);
  }
};

struct PackedQ8_0 : PackedBlock {
  static constexpr int kBytes = 34, kZero = 128;
  static constexpr bool kMinima = false;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {  // signed: from 0 on with the sign bit turned
    return load_words(p + kScaleVector + kWordVector * W) ^ set1_u32(0x80808080);
  }
};

// blocks::kIq4Values, plus 128.
struct NonlinearValues {
  std::uint8_t of[16];
};
constexpr NonlinearValues kNonlinear = [] {
  NonlinearValues values{};
  for (int i = 0; i < 16; ++i) values.of[i] = static_cast<std::uint8_t>(blocks::kIq4Values[i] + 128);
  return values;
}();

struct PackedIQ4_NL : PackedBlock {
  static constexpr int kBytes = 18, kZero = 128;
  static constexpr bool kMinima = false;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return lookup(load_u8(kNonlinear.of), split_nibbles<W>(p + kScaleVector));
  }
};

struct PackedSuperblock {
  static constexpr int kColumns = 256;
  template <int G, int W>
  static constexpr int kUp = 0;
};

// Scale and minimum of group G of Q4_K and Q5_K, 6 bits each in three words (blocks::k_scales).
template <int G>
inline f32x16 k_scale(const std::uint8_t* words) {
  if constexpr (G < 4) {
    return to_f32(shift_right<8 * G>(load_words(words)) & set1_u32(63));
  } else {
    const u32x16 low = shift_right<8 * (G - 4)>(load_words(words + 2 * kWordVector)) & set1_u32(15);
    const u32x16 high = shift_right<8 * (G - 4) + 2>(load_words(words)) & set1_u32(48);
    return to_f32(low | high);
  }
}
template <int G>
inline f32x16 k_minimum(const std::uint8_t* words) {
  if constexpr (G < 4) {
    return to_f32(shift_right<8 * G>(load_words(words + kWordVector)) & set1_u32(63));
  } else {
    const u32x16 low = shift_right<8 * (G - 4) + 4>(load_words(words + 2 * kWordVector)) & set1_u32(15);
    const u32x16 high = shift_right<8 * (G - 4) + 2>(load_words(words + kWordVector)) & set1_u32(48);
    return to_f32(low | high);
  }
}

inline f32x16 negative(f32x16 a) { return set1(0.0f) - a; }

// Groups come in pairs that share their words: nibbles below, nibbles above.
template <int G, int W>
inline u32x16 pair_of_nibbles(const std::uint8_t* codes) {
  return load_words(codes + kWordVector * (8 * (G / 2) + W));
}

struct PackedQ4_K : PackedSuperblock {
  static constexpr int kBytes = 144, kZero = 0, kScales = 1;
  static constexpr bool kMinima = true;
  static constexpr int kCodes = 2 * kScaleVector + 3 * kWordVector;
  template <int G, int W>
  static constexpr int kUp = in_place(G % 2 * 4);
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return nibbles_in_place<G % 2 * 4>(pair_of_nibbles<G, W>(p + kCodes));
  }
  template <int G, int S>
  static f32x16 scale(const std::uint8_t* p) {
    return load_f16(p) * k_scale<G>(p + 2 * kScaleVector);
  }
  template <int G, int S>
  static f32x16 minimum(const std::uint8_t* p) {
    return negative(load_f16(p + kScaleVector)) * k_minimum<G>(p + 2 * kScaleVector);
  }
};

// Bit G of every byte, in the place of bit `To`.
template <int G, int To>
inline u32x16 bit(u32x16 a) {
  const u32x16 mask = set1_u32(0x01010101u << To);
  if constexpr (G <= To) {
    return shift_left<To - G>(a) & mask;
  } else {
    return shift_right<G - To>(a) & mask;
  }
}

struct PackedQ5_K : PackedSuperblock {
  static constexpr int kBytes = 176, kZero = 0, kScales = 1;
  static constexpr bool kMinima = true;
  static constexpr int kHigh = 2 * kScaleVector + 3 * kWordVector, kCodes = kHigh + 8 * kWordVector;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return nibbles<G % 2 * 4>(pair_of_nibbles<G, W>(p + kCodes)) |
           bit<G, 4>(load_words(p + kHigh + kWordVector * W));
  }
  template <int G, int S>
  static f32x16 scale(const std::uint8_t* p) {
    return PackedQ4_K::scale<G, S>(p);
  }
  template <int G, int S>
  static f32x16 minimum(const std::uint8_t* p) {
    return PackedQ4_K::minimum<G, S>(p);
  }
};

struct PackedQ6_K : PackedSuperblock {
  static constexpr int kBytes = 210, kZero = 32, kScales = 2;
  static constexpr bool kMinima = false;
  static constexpr int kHigh = kScaleVector + 4 * kWordVector, kCodes = kHigh + 16 * kWordVector;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    constexpr int half = G / 4, quarter = G % 4;
    const u32x16 low = load_words(p + kCodes + kWordVector * (16 * half + 8 * (quarter % 2) + W));
    const u32x16 high = load_words(p + kHigh + kWordVector * (8 * half + W));
    return nibbles<quarter / 2 * 4>(low) | (in_place<quarter>(high) & set1_u32(0x30303030));
  }
  // Bits 2 Quarter and 2 Quarter + 1 of every byte, moved to bits 4 and 5.
  template <int Quarter>
  static u32x16 in_place(u32x16 a) {
    if constexpr (Quarter < 2) {
      return shift_left<4 - 2 * Quarter>(a);
    } else {
      return shift_right<2 * Quarter - 4>(a);
    }
  }
  template <int G, int S>
  static f32x16 scale(const std::uint8_t* p) {
    constexpr int i = G / 4 * 8 + G % 4 * 2 + S;
    return load_f16(p) * signed_byte<i % 4>(load_words(p + kScaleVector + kWordVector * (i / 4)));
  }
};

struct PackedQ2_K : PackedSuperblock {
  static constexpr int kBytes = 84, kZero = 0, kScales = 2;
  static constexpr bool kMinima = true;
  static constexpr int kLevels = 2 * kScaleVector, kCodes = kLevels + 4 * kWordVector;
  template <int G, int W>
  static constexpr int kUp = in_place(2 * (G % 4));
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    const u32x16 word = load_words(p + kCodes + kWordVector * (8 * (G / 4) + W));
    constexpr int down = 2 * (G % 4) - kUp<G, W>;
    return shift_right<down>(word) & set1_u32(0x03030303u << kUp<G, W>);
  }
  template <int G, int S>
  static u32x16 level(const std::uint8_t* p) {  // scale below, minimum above: 4 bits each
    constexpr int i = 2 * G + S;
    return shift_right<8 * (i % 4)>(load_words(p + kLevels + kWordVector * (i / 4)));
  }
  template <int G, int S>
  static f32x16 scale(const std::uint8_t* p) {
    return load_f16(p) * to_f32(level<G, S>(p) & set1_u32(15));
  }
  template <int G, int S>
  static f32x16 minimum(const std::uint8_t* p) {
    return negative(load_f16(p + kScaleVector)) * to_f32(shift_right<4>(level<G, S>(p)) & set1_u32(15));
  }
};

struct PackedQ3_K : PackedSuperblock {
  static constexpr int kBytes = 110, kZero = 4, kScales = 2;
  static constexpr bool kMinima = false;
  static constexpr int kHigh = kScaleVector + 3 * kWordVector, kCodes = kHigh + 8 * kWordVector;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    const u32x16 pairs = load_words(p + kCodes + kWordVector * (8 * (G / 4) + W));
    return (shift_right<2 * (G % 4)>(pairs) & set1_u32(0x03030303)) |
           bit<G, 2>(load_words(p + kHigh + kWordVector * W));
  }
  // 6 bits: four below in the nibbles of words 0 and 1, two above in word 2; minus 32.
  template <int G, int S>
  static f32x16 scale(const std::uint8_t* p) {
    constexpr int i = 2 * G + S;
    const std::uint8_t* words = p + kScaleVector;
    const u32x16 low =
        shift_right<8 * (i % 4) + i / 8 * 4>(load_words(words + kWordVector * (i / 4 % 2))) & set1_u32(15);
    const u32x16 high = shift_right<8 * (i % 4) + 2 * (i / 4)>(load_words(words + 2 * kWordVector));
    const u32x16 two = high & set1_u32(3);
    return load_f16(p) * (to_f32(low | shift_left<4>(two)) - set1(32.0f));
  }
};

struct PackedIQ4_XS : PackedSuperblock {
  static constexpr int kBytes = 136, kZero = 128, kScales = 1;
  static constexpr bool kMinima = false;
  static constexpr int kLow = 2 * kScaleVector, kCodes = kLow + kWordVector;
  template <int G, int W>
  static u32x16 codes(const std::uint8_t* p) {
    return lookup(load_u8(kNonlinear.of), split_nibbles<W>(p + kCodes + 4 * kWordVector * G));
  }
  // 6 bits: four below in one word, two above in 16 bits; minus 32.
  template <int G, int S>
  static f32x16 scale(const std::uint8_t* p) {
    const u32x16 low = shift_right<4 * G>(load_words(p + kLow)) & set1_u32(15);
    const u32x16 high = shift_right<2 * G>(load_halves(p + kScaleVector)) & set1_u32(3);
    return load_f16(p) * (to_f32(low | shift_left<4>(high)) - set1(32.0f));
  }
};

// Calls f with the type's struct; false for types without blocks.
template <class F>
inline bool with_packed(gguf::DType type, F f) {
  using gguf::DType;
  switch (type) {
    case DType::Q4_0:
      return f(PackedQ4_0{}), true;
    case DType::Q4_1:
      return f(PackedQ4_1{}), true;
    case DType::Q5_0:
      return f(PackedQ5_0{}), true;
    case DType::Q5_1:
      return f(PackedQ5_1{}), true;
    case DType::Q8_0:
      return f(PackedQ8_0{}), true;
    case DType::Q2_K:
      return f(PackedQ2_K{}), true;
    case DType::Q3_K:
      return f(PackedQ3_K{}), true;
    case DType::Q4_K:
      return f(PackedQ4_K{}), true;
    case DType::Q5_K:
      return f(PackedQ5_K{}), true;
    case DType::Q6_K:
      return f(PackedQ6_K{}), true;
    case DType::IQ4_NL:
      return f(PackedIQ4_NL{}), true;
    case DType::IQ4_XS:
      return f(PackedIQ4_XS{}), true;
    default:
      return false;
  }
}

}  // namespace
}  // namespace ringlm::cpu

// The decode layout of a weight matrix, the kernel that makes it of rows as the file has them, and the
// functions that turn its blocks back into numbers.
//
// Rows come in groups of 4, columns in blocks of 32 and those in tiles of up to 32 blocks (the last tile of a
// group is the shorter one). A tile has what a warp needs of it in one piece, so that lane b, which takes
// block b, reads it coalesced, 16 bytes at a time, and what is small of all four rows at once. A tile of n
// blocks, in this order:
//
//   codes   [4 rows][pieces][n blocks][16 bytes]
//   high    [n][4 rows] of 4 bytes, or [2][n][2 rows] of 8: the bits of codes above the fourth
//   scales  [n][4 rows] of 2 or 4 bytes
//   super   [n / 8][4 rows] of 2 or 4 bytes: what 256 columns share
//
//   type   codes                high      scales                      super
//   Q4_0   nibbles              -         half d                      -
//   Q4_1   nibbles              -         half d, half m              -
//   Q5_0   nibbles              fifth     half d                      -
//   Q5_1   nibbles              fifth     half d, half m              -
//   Q8_0   signed bytes         -         half d                      -
//   Q4_K   nibbles              -         8-bit scale, 8-bit minimum  half d, half dmin
//   Q5_K   nibbles              fifth     8-bit scale, 8-bit minimum  half d, half dmin
//   Q6_K   nibbles              two bits  8-bit scale of 16 columns each  half d
//   F16, BF16, F32: as they are
//
// Byte j of nibbles has weight j below and weight j + 16 above. Bit w of byte i of the fifth bits is of
// weight 4 w + i. Bits 2 w and 2 w + 1 of byte i of the first word of two bits are of weight 4 w + i, those
// of the second word of weight 16 + 4 w + i. So a word of four codes takes a shift and a mask from each.
//
// Bytes are those of the file, but for 6-bit scales in 8 bits: Q4_K 148 / 144, Q5_K 180 / 176. Rows that the
// last group does not have and columns behind the last one are zero.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/launch.h"
#include "cuda/port.h"

namespace ringlm::cuda {

constexpr int kTileBlocks = 32;
constexpr int kSuperBlocks = 8;  // blocks of 256 columns

// Bytes of one row: of 32 columns, and of 256.
struct Layout {
  int codes, high, scales, super;
};

__host__ __device__ constexpr Layout layout_of(gguf::DType type) {
  using enum gguf::DType;
  switch (type) {
    case Q4_0:
      return {16, 0, 2, 0};
    case Q4_1:
      return {16, 0, 4, 0};
    case Q5_0:
      return {16, 4, 2, 0};
    case Q5_1:
      return {16, 4, 4, 0};
    case Q8_0:
      return {32, 0, 2, 0};
    case Q4_K:
      return {16, 0, 2, 4};
    case Q5_K:
      return {16, 4, 2, 4};
    case Q6_K:
      return {16, 8, 2, 2};
    case F16:
    case BF16:
      return {64, 0, 0, 0};
    case F32:
      return {128, 0, 0, 0};
    default:
      return {0, 0, 0, 0};
  }
}

// Of the first `blocks` blocks of a group: where a tile begins. A group takes whole sectors of 32 bytes.
__host__ __device__ constexpr int tile_offset(Layout l, int blocks) {
  return kGroupRows * (blocks * (l.codes + l.high + l.scales) + blocks / kSuperBlocks * l.super);
}
__host__ __device__ constexpr int group_bytes(Layout l, int blocks) {
  return (tile_offset(l, blocks) + 31) / 32 * 32;
}

// Where things are in a tile of n blocks: bytes from its beginning.
template <gguf::DType kType>
struct TilePlaces {
  static constexpr Layout kLayout = layout_of(kType);
  static constexpr int kPieces = kLayout.codes / 16;
  int n;

  __device__ int codes(int row, int piece, int block) const {
    return ((row * kPieces + piece) * n + block) * 16;
  }
  __device__ int high(int row, int block) const {
    constexpr int kRows = kLayout.high == 8 ? 2 : 4;  // in 16 bytes
    return kGroupRows * kLayout.codes * n + (row / kRows * n + block) * 16 + row % kRows * kLayout.high;
  }
  __device__ int scales(int row, int block) const {
    return kGroupRows * (kLayout.codes + kLayout.high) * n + (block * kGroupRows + row) * kLayout.scales;
  }
  __device__ int super(int row, int block) const {
    return kGroupRows * (kLayout.codes + kLayout.high + kLayout.scales) * n +
           (block / kSuperBlocks * kGroupRows + row) * kLayout.super;
  }
};

// The tile that has a block of a row.
template <gguf::DType kType>
struct TileOf {
  std::size_t offset;  // from the beginning of the matrix
  TilePlaces<kType> places;
  int row, block;  // in the tile

  __device__ TileOf(std::int64_t matrix_row, int matrix_block, int blocks) {
    const int first = matrix_block / kTileBlocks * kTileBlocks;
    offset = static_cast<std::size_t>(matrix_row / kGroupRows) *
                 static_cast<std::size_t>(group_bytes(layout_of(kType), blocks)) +
             static_cast<std::size_t>(tile_offset(layout_of(kType), first));
    places.n = min(kTileBlocks, blocks - first);
    row = static_cast<int>(matrix_row % kGroupRows);
    block = matrix_block - first;
  }
};

// ---- blocks as numbers

template <gguf::DType kType>
constexpr bool kFloats = layout_of(kType).scales == 0;
template <gguf::DType kType>
constexpr bool kMinima = layout_of(kType).scales == 4 || layout_of(kType).super == 4;
template <gguf::DType kType>
constexpr bool kHalfScales = kType == gguf::DType::Q6_K;  // a scale for 16 columns

// The code that means zero, in types without minima.
template <gguf::DType kType>
constexpr int kZero = kType == gguf::DType::Q4_0   ? 8
                      : kType == gguf::DType::Q5_0 ? 16
                      : kHalfScales<kType>         ? 32
                                                   : 0;

// Word w: the codes of weights 16 side + 4 w to 16 side + 4 w + 3, a byte each.
template <gguf::DType kType>
__device__ __forceinline__ void unpack(const uint4 (&pieces)[TilePlaces<kType>::kPieces],
                                       [[maybe_unused]] uint2 high, int side, std::uint32_t (&words)[4]) {
  constexpr int kHigh = layout_of(kType).high;
  constexpr bool kNibbles = TilePlaces<kType>::kPieces == 1;
  const uint4 piece = pieces[kNibbles ? 0 : side];
  words[0] = piece.x, words[1] = piece.y, words[2] = piece.z, words[3] = piece.w;
  if constexpr (kNibbles) {
#pragma unroll
    for (int w = 0; w < 4; ++w) words[w] = (side == 0 ? words[w] : words[w] >> 4) & 0x0f0f0f0fu;
  }
  if constexpr (kHigh != 0) {
    constexpr std::uint32_t kMask = kHigh == 4 ? 0x10101010u : 0x30303030u;
    const std::uint32_t from = kHigh == 4 || side == 0 ? high.x : high.y;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int up = kHigh == 4 ? 4 - w - 4 * side : 4 - 2 * w;
      words[w] |= (up >= 0 ? from << up : from >> -up) & kMask;
    }
  }
}

// What a code becomes: code * d + m, or (code - kZero) * d; with kHalfScales m is the d of columns 16 to 31.
struct Scale {
  float d, m;
};

// scales, super: the bits of one row, in the low part of the words. Products of two factors are exact in
// float32 here and in what follows, so it is all the same whether sums are fused with them.
template <gguf::DType kType>
__device__ __forceinline__ Scale scale_of(std::uint32_t scales, [[maybe_unused]] std::uint32_t super) {
  const auto low_half = [](std::uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  };
  if constexpr (kHalfScales<kType>) {
    const float d = low_half(super);
    return {d * static_cast<float>(static_cast<std::int8_t>(scales)),
            d * static_cast<float>(static_cast<std::int8_t>(scales >> 8))};
  } else if constexpr (layout_of(kType).super != 0) {
    return {low_half(super) * static_cast<float>(scales & 255u),
            -low_half(super >> 16) * static_cast<float>(scales >> 8 & 255u)};
  } else {
    return {low_half(scales), kMinima<kType> ? low_half(scales >> 16) : 0.0f};
  }
}

// Byte i of a word as a float, minus zero: 2^23 + byte has the byte in its lowest bits.
__device__ __forceinline__ float byte_minus(std::uint32_t word, int i, int zero) {
  const std::uint32_t bits = __byte_perm(word, 0x4b000000u, 0x7540u | static_cast<unsigned>(i));
  return __uint_as_float(bits) - (8388608.0f + static_cast<float>(zero));
}

// Bits of a number of kBytes at a 4-byte (kBytes 4) or 2-byte aligned place.
template <int kBytes>
__device__ __forceinline__ std::uint32_t ld_bits(const std::uint8_t* at) {
  if constexpr (kBytes == 2) {
    return ld_global(reinterpret_cast<const std::uint16_t*>(at));
  } else if constexpr (kBytes == 4) {
    return ld_global(reinterpret_cast<const std::uint32_t*>(at));
  } else {
    return 0;
  }
}

// A number of F16, BF16 or F32 from its place in a piece.
template <gguf::DType kType>
__device__ __forceinline__ float float_of(uint4 piece, int i) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  if constexpr (kType == gguf::DType::F32) {
    return __uint_as_float(words[i]);
  } else if constexpr (kType == gguf::DType::BF16) {
    return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(bits_as<half2>(words[i / 2]));
    return i % 2 == 0 ? pair.x : pair.y;
  }
}

// Columns 32 block to 32 block + 31 of a row, with the bits that ringlm::dequantize gives. Neighbouring lanes
// should take neighbouring blocks of a row.
template <gguf::DType kType>
__device__ __forceinline__ void dequantize_block(const DeviceMatrix& w, int row, int block,
                                                 float (&out)[kBlock]) {
  using Places = TilePlaces<kType>;
  const TileOf<kType> tile(row, block, blocks_of(w.cols));
  const std::uint8_t* const at = w.data + tile.offset;
  uint4 pieces[Places::kPieces];
#pragma unroll
  for (int p = 0; p < Places::kPieces; ++p) {
    pieces[p] = ld_global(reinterpret_cast<const uint4*>(at + tile.places.codes(tile.row, p, tile.block)));
  }
  if constexpr (kFloats<kType>) {
    constexpr int kInPiece = kBlock / Places::kPieces;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) out[i] = float_of<kType>(pieces[i / kInPiece], i % kInPiece);
  } else {
    constexpr Layout kLayout = Places::kLayout;
    uint2 high{};
    const std::uint8_t* const high_at = at + tile.places.high(tile.row, tile.block);
    if constexpr (kLayout.high == 4) high.x = ld_bits<4>(high_at);
    if constexpr (kLayout.high == 8) high = ld_global(reinterpret_cast<const uint2*>(high_at));
    const Scale scale =
        scale_of<kType>(ld_bits<kLayout.scales>(at + tile.places.scales(tile.row, tile.block)),
                        ld_bits<kLayout.super>(at + tile.places.super(tile.row, tile.block)));
    constexpr bool kSigned = kType == gguf::DType::Q8_0;
    std::uint32_t words[2][4];
    unpack<kType>(pieces, high, 0, words[0]);
    unpack<kType>(pieces, high, 1, words[1]);
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      const std::uint32_t word = words[i / 16][i % 16 / 4] ^ (kSigned ? 0x80808080u : 0u);
      const float code = byte_minus(word, i % 4, kSigned ? 128 : kZero<kType>);
      if constexpr (kMinima<kType>) {
        out[i] = code * scale.d + scale.m;
      } else {
        out[i] = code * (kHalfScales<kType> && i >= 16 ? scale.m : scale.d);
      }
    }
  }
}

// The same, rounded once: columns 2 i and 2 i + 1 in out[i].
template <gguf::DType kType>
__device__ __forceinline__ void dequantize_block(const DeviceMatrix& w, int row, int block,
                                                 half2 (&out)[kBlock / 2]) {
  float values[kBlock];
  dequantize_block<kType>(w, row, block, values);
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) out[i] = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
}

// ---- from the order of the file

struct Pack {
  std::uint8_t* to;
  const std::uint8_t* file;  // [n, row_bytes]
  std::int64_t first, n;
  int cols;
};

// Code of weight j of a block of 32 columns, or of group g of a K block (gguf/blocks.h), as unpack() gives
// it.
template <gguf::DType kType>
__device__ __forceinline__ std::uint32_t code_in_file(const std::uint8_t* block, [[maybe_unused]] int g,
                                                      int j) {
  using enum gguf::DType;
  const auto byte = [&](int at) { return static_cast<std::uint32_t>(ld_global(block + at)); };
  const auto nibble = [&](int at, bool upper) { return upper ? byte(at) >> 4 : byte(at) & 15u; };
  if constexpr (kType == Q8_0) {
    return byte(2 + j);
  } else if constexpr (kType == Q4_0) {
    return nibble(2 + j % 16, j >= 16);
  } else if constexpr (kType == Q4_1) {
    return nibble(4 + j % 16, j >= 16);
  } else if constexpr (kType == Q5_0 || kType == Q5_1) {
    constexpr int kHigh = kType == Q5_0 ? 2 : 4;
    return nibble(kHigh + 4 + j % 16, j >= 16) | (byte(kHigh + j / 8) >> j % 8 & 1u) << 4;
  } else if constexpr (kType == Q4_K) {
    return nibble(16 + g / 2 * 32 + j, g % 2 != 0);
  } else if constexpr (kType == Q5_K) {
    return nibble(48 + g / 2 * 32 + j, g % 2 != 0) | (byte(16 + j) >> g & 1u) << 4;
  } else {
    static_assert(kType == Q6_K);
    const int half_block = g / 4, quarter = g % 4;
    return nibble(64 * half_block + quarter % 2 * 32 + j, quarter >= 2) |
           (byte(128 + 32 * half_block + j) >> 2 * quarter & 3u) << 4;
  }
}

// What scale_of() takes, of the same block: the bits of scales and of super.
template <gguf::DType kType>
__device__ __forceinline__ uint2 scales_in_file(const std::uint8_t* block, [[maybe_unused]] int g) {
  const auto byte = [&](int at) { return static_cast<std::uint32_t>(ld_global(block + at)); };
  const auto half_at = [&](int at) { return byte(at) | byte(at + 1) << 8; };
  if constexpr (kHalfScales<kType>) {
    return make_uint2(half_at(192 + 2 * g), half_at(208));
  } else if constexpr (layout_of(kType).super != 0) {
    const std::uint8_t* const s = block + 4;  // blocks::k_scales
    const auto of_s = [&](int at) { return static_cast<std::uint32_t>(ld_global(s + at)); };
    const std::uint32_t scale = g < 4 ? of_s(g) & 63u : (of_s(g + 4) & 15u) | of_s(g - 4) >> 6 << 4;
    const std::uint32_t minimum = g < 4 ? of_s(g + 4) & 63u : of_s(g + 4) >> 4 | of_s(g) >> 6 << 4;
    return make_uint2(scale | minimum << 8, half_at(0) | half_at(2) << 16);
  } else {
    return make_uint2(half_at(0) | (kMinima<kType> ? half_at(2) << 16 : 0u), 0u);
  }
}

template <int kBytes>
__device__ __forceinline__ void st_bits(std::uint8_t* at, std::uint32_t bits) {
  if constexpr (kBytes == 2)
    st_global(reinterpret_cast<std::uint16_t*>(at), static_cast<std::uint16_t>(bits));
  if constexpr (kBytes == 4) st_global(reinterpret_cast<std::uint32_t*>(at), bits);
}

// One thread a row and block of 32 columns, neighbours have neighbouring blocks. Done once, at load: bytes
// are read one by one, from L1.
template <gguf::DType kType>
__global__ void __launch_bounds__(256) pack_rows(Pack a) {
  using Places = TilePlaces<kType>;
  constexpr Layout kLayout = Places::kLayout;
  const int blocks = blocks_of(a.cols);
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t row = i / blocks;
  const int block = static_cast<int>(i % blocks);
  if (row >= (a.n + kGroupRows - 1) / kGroupRows * kGroupRows) return;
  const bool there = row < a.n;
  const TileOf<kType> tile(a.first + row, block, blocks);
  std::uint8_t* const to = a.to + tile.offset;

  uint4 pieces[Places::kPieces] = {};
  const auto set = [&](int word, std::uint32_t bits) {
    uint4& piece = pieces[word / 4];
    (word % 4 == 0 ? piece.x : word % 4 == 1 ? piece.y : word % 4 == 2 ? piece.z : piece.w) = bits;
  };
  if constexpr (kFloats<kType>) {
    constexpr int kBytes = kLayout.codes / kBlock;
    const std::uint8_t* const from =
        a.file + (static_cast<std::size_t>(row) * static_cast<std::size_t>(a.cols) +
                  static_cast<std::size_t>(block) * kBlock) *
                     kBytes;
    const int cols = there ? a.cols - block * kBlock : 0;
#pragma unroll
    for (int w = 0; w < kLayout.codes / 4; ++w) {
      std::uint32_t bits = 0;
      for (int c = 0; c < 4 / kBytes; ++c) {
        const int column = w * (4 / kBytes) + c;
        if (column < cols) bits |= ld_bits<kBytes>(from + column * kBytes) << 16 * c;
      }
      set(w, bits);
    }
  } else {
    constexpr bool kSuper = kLayout.super != 0;
    constexpr int kFileBlocks = kSuper ? kSuperBlocks : 1;
    constexpr int kFileBytes = kFileBlocks * (kLayout.codes + kLayout.high) + (kHalfScales<kType> ? 18
                                                                               : kSuper ? 16
                                                                                        : kLayout.scales);
    const std::uint8_t* const from =
        a.file + (static_cast<std::size_t>(row) * static_cast<std::size_t>(blocks / kFileBlocks) +
                  static_cast<std::size_t>(block / kFileBlocks)) *
                     kFileBytes;
    const int g = block % kFileBlocks;
    std::uint32_t words[8] = {};
    uint2 scales{};
    if (there) {
#pragma unroll
      for (int j = 0; j < kBlock; ++j) words[j / 4] |= code_in_file<kType>(from, g, j) << 8 * (j % 4);
      scales = scales_in_file<kType>(from, g);
    }
    uint2 high{};
    if constexpr (kType == gguf::DType::Q8_0) {
#pragma unroll
      for (int w = 0; w < 8; ++w) set(w, words[w]);
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        set(w, (words[w] & 0x0f0f0f0fu) | (words[w + 4] & 0x0f0f0f0fu) << 4);
        if constexpr (kLayout.high == 4) {
          high.x |= (words[w] >> 4 & 0x01010101u) << w | (words[w + 4] >> 4 & 0x01010101u) << (w + 4);
        } else {
          high.x |= (words[w] >> 4 & 0x03030303u) << 2 * w;
          high.y |= (words[w + 4] >> 4 & 0x03030303u) << 2 * w;
        }
      }
    }
    std::uint8_t* const high_to = to + tile.places.high(tile.row, tile.block);
    if constexpr (kLayout.high == 4) st_bits<4>(high_to, high.x);
    if constexpr (kLayout.high == 8) st_global(reinterpret_cast<uint2*>(high_to), high);
    st_bits<kLayout.scales>(to + tile.places.scales(tile.row, tile.block), scales.x);
    if (g == 0) st_bits<kLayout.super>(to + tile.places.super(tile.row, tile.block), scales.y);
  }
#pragma unroll
  for (int p = 0; p < Places::kPieces; ++p) {
    st_global(reinterpret_cast<uint4*>(to + tile.places.codes(tile.row, p, tile.block)), pieces[p]);
  }
}

// f(std::integral_constant<gguf::DType, type>{}), for types that can be packed.
template <class F>
void with_packed_type(gguf::DType type, F f) {
  using enum gguf::DType;
  const auto call = [&]<gguf::DType... kTypes>(std::integer_sequence<gguf::DType, kTypes...>) {
    ((type == kTypes ? f(std::integral_constant<gguf::DType, kTypes>{}) : void()), ...);
  };
  call(std::integer_sequence<gguf::DType, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32>{});
}

}  // namespace ringlm::cuda

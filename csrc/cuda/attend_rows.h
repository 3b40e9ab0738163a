// Rows of the ring as lanes of a warp load them, and as tensor cores take them: see attend.h.
#pragma once

#include "cuda/launch.h"
#include "cuda/port.h"

namespace ringlm::cuda::attention {

constexpr int kTile = 64;       // positions, as in kv/ring.h
constexpr int kWarps = 4;       // of a block
constexpr int kKeys = 16;       // of a tile that a warp takes
constexpr int kColumns = 8;     // query heads of a product
constexpr int kUp = 13;         // weights are at most 2^(kUp + 1)
constexpr float kLow = -1e30f;  // below every score, and finite

template <KvFormat kFormat>
constexpr int kBytes = kFormat == KvFormat::Int8 ? 1 : 2;  // of an element

// Tiles of 8 query heads that a warp takes at once.
constexpr int head_tiles(int group, int head_dim, bool same_format) {
  return group > kColumns && head_dim <= 128 && same_format ? 2 : 1;
}

// Blocks that the registers of an SM should have room for: as many as leave none spilled.
constexpr int blocks_of_an_sm(KvFormat keys, KvFormat values, int head_dim, int head_tiles) {
  const int sums = head_dim * head_tiles;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  const int blocks = sums <= 64 ? 4 : sums <= 128 ? 3 : 2;
#else
  const int blocks = sums <= 64 ? 5 : sums <= 128 ? 4 : sums < 256 ? 3 : 2;
#endif
  const bool all_int8 = keys == KvFormat::Int8 && values == KvFormat::Int8, mixed = keys != values;
  const bool larger =
      (head_dim == 96 && !all_int8) || (head_dim == 128 && mixed) || (head_dim == 64 && head_tiles == 2);
  return larger && blocks > 2 ? blocks - 1 : blocks;
}

// ---- how lanes share a row

// kLanes lanes load a row of kRow bytes in pieces of 16 bytes a lane, one lane beside the other, and what
// is left in smaller ones.
template <int kRow, int kLanes>
struct Share {
  static constexpr int kMine = kRow / kLanes;  // bytes of a lane
  static constexpr int kWords = (kMine + 3) / 4;
  static constexpr int kWhole = kMine / 16 * 4;  // words in pieces of 16 bytes

  static __device__ __forceinline__ constexpr int piece_bytes(int begin) {
    const int left = kMine - begin;
    return left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : 2;
  }
  // Where in the row byte `at` of the lane's is.
  static __device__ __forceinline__ constexpr int byte_of(int lane, int at) {
    int begin = 0;
    while (begin + piece_bytes(begin) <= at) begin += piece_bytes(begin);
    return begin * kLanes + lane * piece_bytes(begin) + at - begin;
  }

  // Words [kFirst, kEnd) of the lane, which are all or whole pieces of 16 bytes.
  template <int kFirst, int kEnd>
  static __device__ __forceinline__ void load(const std::uint8_t* row, int lane,
                                              std::uint32_t (&words)[kWords]) {
#pragma unroll
    for (int w = kFirst; w < (kEnd < kWhole ? kEnd : kWhole); w += 4) {
      const uint4 x = ld_global_stream(reinterpret_cast<const uint4*>(row + byte_of(lane, 4 * w)));
      words[w] = x.x;
      words[w + 1] = x.y;
      words[w + 2] = x.z;
      words[w + 3] = x.w;
    }
    if constexpr (kEnd > kWhole) {
      constexpr int kFour = kMine % 16 / 8 * 2 + kWhole, kTwo = kMine % 8 / 4 + kFour;
      if constexpr (kFour > kWhole) {
        const uint2 x = ld_global_stream(reinterpret_cast<const uint2*>(row + byte_of(lane, 4 * kWhole)));
        words[kWhole] = x.x;
        words[kWhole + 1] = x.y;
      }
      if constexpr (kTwo > kFour) {
        words[kFour] =
            ld_global_stream(reinterpret_cast<const std::uint32_t*>(row + byte_of(lane, 4 * kFour)));
      }
      if constexpr (kMine % 4 == 2) {
        words[kTwo] = ld_global_stream(reinterpret_cast<const std::uint16_t*>(row + byte_of(lane, 4 * kTwo)));
      }
    }
  }
};

// half2 of nvcc is not what bits_as takes.
__device__ __forceinline__ std::uint32_t bits_of(half2 x) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Bytes kSelect of x are codes, 128 above what they mean: as halves, from 1024 + byte, which is exact.
template <int kSelect>
__device__ __forceinline__ std::uint32_t halves_of_codes(std::uint32_t x) {
  const std::uint32_t bytes = __byte_perm(x, 0x64646464u, kSelect);
  return bits_of(__hsub2(bits_as<half2>(bytes), bits_as<half2>(0x64806480u)));
}

// K or V of a KV head.
template <KvFormat kFormat, int kHeadDim>
struct Rows {
  const std::uint8_t* data;
  const std::uint8_t* scales;
  __device__ __forceinline__ const std::uint8_t* row(int slot) const {
    return data + std::int64_t{slot} * (kHeadDim * kBytes<kFormat>);
  }
  __device__ __forceinline__ float scale(int slot) const {
    if constexpr (kFormat != KvFormat::Int8) return 1.0f;
    return __half2float(
        __ushort_as_half(ld_global_stream(reinterpret_cast<const std::uint16_t*>(scales) + slot)));
  }
};

// The lane's part of 16 keys. Step s of the product takes 4 elements of each row.
template <KvFormat kFormat, int kHeadDim>
struct Keys {
  using Row = Share<kHeadDim * kBytes<kFormat>, 4>;
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kPieces = kFormat == KvFormat::F16 && kHeadDim >= 128 ? 2 : 1;
  std::uint32_t words[2][Row::kWords];  // of rows g and g + 8

  // The first of the lane's 4 neighbouring elements of step s.
  static __device__ __forceinline__ constexpr int dim(int t, int s) {
    return Row::byte_of(t, 4 * s * kBytes<kFormat>) / kBytes<kFormat>;
  }
  template <int kPiece>
  __device__ __forceinline__ void load(const Rows<kFormat, kHeadDim>& rows, const int (&slots)[2], int t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Row::template load<kPiece * Row::kWords / kPieces, (kPiece + 1) * Row::kWords / kPieces>(
          rows.row(slots[i]), t, words[i]);
    }
  }
  __device__ __forceinline__ void fragment(int s, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kFormat == KvFormat::Int8) {
        a[i] = halves_of_codes<0x4140>(words[i][s]);
        a[2 + i] = halves_of_codes<0x4342>(words[i][s]);
      } else {
        a[i] = words[i][2 * s];
        a[2 + i] = words[i][2 * s + 1];
      }
    }
  }
};

// The lane's part of 16 values. Tile j of the output has 2 of its elements of each row.
template <KvFormat kFormat, int kHeadDim>
struct Values {
  using Row = Share<kHeadDim * kBytes<kFormat>, 8>;
  static constexpr int kTiles = kHeadDim / 16;
  static constexpr int kPieces = kFormat == KvFormat::F16 && kHeadDim >= 128 ? 2 : 1;
  std::uint32_t words[4][Row::kWords];  // of rows 2t, 2t + 1, 2t + 8, 2t + 9

  // The first of the lane's 2 neighbouring elements of tile j: in rows g and g + 8 of the product.
  static __device__ __forceinline__ constexpr int dim(int g, int j) {
    return Row::byte_of(g, 2 * j * kBytes<kFormat>) / kBytes<kFormat>;
  }
  template <int kPiece>
  __device__ __forceinline__ void load(const Rows<kFormat, kHeadDim>& rows, const int (&slots)[4], int g) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Row::template load<kPiece * Row::kWords / kPieces, (kPiece + 1) * Row::kWords / kPieces>(
          rows.row(slots[i]), g, words[i]);
    }
  }
  __device__ __forceinline__ void fragment(int j, std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // positions 2t and 2t + 1, then those 8 behind
      if constexpr (kFormat == KvFormat::Int8) {
        const std::uint32_t x = words[2 * i][j / 2], y = words[2 * i + 1][j / 2];
        const std::uint32_t pairs = __byte_perm(x, y, j % 2 == 0 ? 0x5140 : 0x7362);
        a[2 * i] = halves_of_codes<0x4140>(pairs);
        a[2 * i + 1] = halves_of_codes<0x4342>(pairs);
      } else {
        const std::uint32_t x = words[2 * i][j], y = words[2 * i + 1][j];
        a[2 * i] = __byte_perm(x, y, 0x5410);
        a[2 * i + 1] = __byte_perm(x, y, 0x7632);
      }
    }
  }
};

// ---- what a row sees

// Consecutive positions: the pinned ones, or the moving ones. They are counted from the first.
struct Run {
  int n;
  int lead;      // positions that its first tile has before the first one
  int slot;      // of the first
  int wrap, by;  // slots from `wrap` on are that many lower
  int own;       // from here on the query's own epoch
  bool pinned;
  __device__ __forceinline__ int tiles() const { return n > 0 ? (lead + n + kTile - 1) / kTile : 0; }
  // Positions that are not seen borrow a slot of one that is.
  __device__ __forceinline__ int slot_of(int i) const {
    i = i < 0 ? 0 : i;
    i = slot + (i < n ? i : n - 1);
    return i < wrap ? i : i - by;
  }
};

struct Seen {
  Run pinned, moving;
  __device__ __forceinline__ int tiles() const { return pinned.tiles() + moving.tiles(); }
};

__device__ __forceinline__ Seen seen_by(const DeviceRow* row, const KvLayer* layer, bool centred) {
  const std::int64_t p = ld_global(&row->position), pinned = ld_global(&layer->pinned);
  const std::int64_t capacity = ld_global(&layer->capacity);
  const std::int64_t oldest = p - (ld_global(&layer->visible) - pinned) + 1;
  const std::int64_t first = oldest > pinned ? oldest : pinned;
  const std::int64_t moving = capacity - pinned;
  Seen seen;
  Run& old = seen.pinned;
  old.n = static_cast<int>(p + 1 < pinned ? p + 1 : pinned);
  old.lead = old.slot = old.own = old.by = 0;
  old.wrap = static_cast<int>(capacity);
  old.pinned = true;
  Run& run = seen.moving;
  run.n = first <= p ? static_cast<int>(p - first + 1) : 0;
  run.lead = static_cast<int>(first % kTile);
  run.slot = static_cast<int>(pinned + (first - pinned) % moving);
  run.wrap = static_cast<int>(capacity);
  run.by = static_cast<int>(moving);
  const std::int64_t own = centred ? p - p % ld_global(&row->epoch) - first : 0;
  run.own = own > 0 ? static_cast<int>(own) : 0;
  run.pinned = false;
  return seen;
}

}  // namespace ringlm::cuda::attention

// Decode attention: for each row of a step and each query head,
//   att = sum over the visible keys of w value / sum of w,   w = exp(cap(scale * q . key))
// over the ring of the row's layer (kv/ring.h), pinned rows with their own query; then, of INT8 values, the
// rotation back, and the row quantized for the next product.
//
// Reads at least the visible rows of K and V with their scales, each once for all query heads of its KV head;
// all else is small beside it.
//
// Grid (KV heads * head tiles, splits, rows), four warps a block. A split is some tiles of 64 consecutive
// positions, cut at multiples of 64; the launch has the same blocks for every length, and those without tiles
// return at once. A warp takes 16 positions of every tile, for 8 or 16 query heads ("columns"). With
// g = lane / 4 and t = lane % 4, on tensor cores (fragments as in port.h):
//   scores [16 keys, 8 columns] = K q: the lane loads its quarter t of rows g and g + 8 in pieces of 16
//   bytes.
//     The head dimension is summed over, so its order is free: it is that in which the lane finds the bytes.
//   out [16 dims, 8 columns] = V^T w: the lane loads its eighth g of rows 2t, 2t + 1, 2t + 8, 2t + 9. Which
//     dims make up the 16 is free as well. w goes from scores to here by a transpose in registers.
// A group of less than 8 heads leaves columns empty: that costs fewer instructions still than products by
// FMA. Groups of more than 16 take several head tiles, each of which reads K and V again, from L2.
//
// Numbers: q and w are halves. q is divided by a power of two that brings its head's largest below 2^14; w is
// relative to the largest w * (scale of the value) so far, times 2^13, and so has 24 bits below its
// largest. Codes of INT8 are exact halves. Sums are float32. An output is off by about 2^-11 of the largest
// value that it averages.
//
// Loads run ahead: values of a tile arrive while scores are computed, keys of the next one during values.
// Where a tile of F16 rows would take more than 32 registers it comes in two pieces. Aimed at: 128
// registers at head size 128 and 16 KiB of shared memory, so four blocks on an SM of either target.
#pragma once

#include "cuda/launch.h"
#include "cuda/port.h"
#include "cuda/quantize.h"
#include "cuda/rotate_back.h"

namespace ringlm::cuda {

namespace attention {

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
  const int sums = head_dim * head_tiles, blocks = sums <= 64 ? 5 : sums <= 128 ? 4 : sums < 256 ? 3 : 2;
  const bool all_int8 = keys == KvFormat::Int8 && values == KvFormat::Int8, mixed = keys != values;
  return blocks - ((head_dim == 96 && !all_int8) || (head_dim == 128 && mixed) ? 1 : 0);
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
    return __half2float(__ushort_as_half(ld_global(reinterpret_cast<const std::uint16_t*>(scales) + slot)));
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

// ---- a warp's share

// The power of two that brings `largest` below 2^14, as Halves has it.
__device__ __forceinline__ float step_of(float largest) {
  const std::uint32_t bits = __float_as_uint(largest) & 0x7f800000u, least = 27u << 23;
  return __uint_as_float((bits > least ? bits : least) - (13u << 23));
}
__device__ __forceinline__ float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}
// The exponent of x >= 0; of 0, that of the least half.
__device__ __forceinline__ float exponent_of(float x) {
  const int exponent = static_cast<int>(__float_as_uint(x) >> 23) - 127;
  return static_cast<float>(exponent > -24 ? exponent : -24);
}

// Queries of a tile of 8 heads, as the second factor of scores, and what makes scores of the products; of the
// block, in shared memory. By one warp.
template <KvFormat kFormat, int kHeadDim>
struct Queries {
  using K = Keys<kFormat, kHeadDim>;
  uint2 fragments[K::kSteps][32];  // by lane
  float4 columns[kColumns];        // factor of the products; offset in the own and in the previous epoch

  // from, offsets (or null): of the first of `heads` heads; less than 8 leave columns of zeros.
  __device__ __forceinline__ void fill(const float* from, const float* offsets, int heads, bool pinned,
                                       float scale) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    float4 x[K::kSteps];
    float largest = 0.0f;
#pragma unroll
    for (int s = 0; s < K::kSteps; ++s) {
      x[s] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (g < heads) x[s] = ld_global(reinterpret_cast<const float4*>(from + g * kHeadDim + K::dim(t, s)));
      largest =
          fmaxf(largest, fmaxf(fmaxf(fabsf(x[s].x), fabsf(x[s].y)), fmaxf(fabsf(x[s].z), fabsf(x[s].w))));
    }
    const float step = step_of(warp_max<4>(largest)), inverse = inverse_of_power(step);
#pragma unroll
    for (int s = 0; s < K::kSteps; ++s) {
      uint2 halves;
      halves.x = bits_of(__floats2half2_rn(x[s].x * inverse, x[s].y * inverse));
      halves.y = bits_of(__floats2half2_rn(x[s].z * inverse, x[s].w * inverse));
      st_shared(&fragments[s][lane], halves);
    }
    if (t > 0) return;
    float4 column = make_float4(scale * step, 0.0f, 0.0f, 0.0f);
    if (offsets != nullptr && g < heads) {
      column.y = scale * ld_global(offsets + g * kEpochs + (pinned ? 2 : 0));
      column.z = scale * ld_global(offsets + g * kEpochs + (pinned ? 2 : 1));
    }
    st_shared(&columns[g], column);
  }
};

// Sums of a warp for a tile of 8 heads: of column 2t + i in max, sum and out[.][i] and out[.][2 + i].
template <int kHeadDim>
struct Sums {
  float max[2], sum[2];  // `sum` of the lane's keys alone, until share_sum
  float out[kHeadDim / 16][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = kLow;
      sum[i] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) out[j][0] = out[j][1] = out[j][2] = out[j][3] = 0.0f;
  }
  __device__ __forceinline__ void multiply(float x, float y) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; ++j) {
      out[j][0] *= x;
      out[j][1] *= y;
      out[j][2] *= x;
      out[j][3] *= y;
    }
  }
  __device__ __forceinline__ void share_sum() {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      sum[0] += shfl_xor(kFullWarp, sum[0], step);
      sum[1] += shfl_xor(kFullWarp, sum[1], step);
    }
  }

  // Scores to base 2 of keys g (c[0], c[1]) and g + 8, -inf where there is none, become weights, times the
  // scales of their values, as the second factor of the output.
  __device__ __forceinline__ void weigh(float (&c)[4], const float (&scales)[2],
                                        std::uint32_t (&weights)[2]) {
    const float up[2] = {exponent_of(scales[0]) - kUp, exponent_of(scales[1]) - kUp};
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(c[i] + up[0], c[2 + i] + up[1]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        largest[i] = fmaxf(largest[i], shfl_xor(kFullWarp, largest[i], step));
      }
    }
    if (warp_any(kFullWarp, largest[0] > max[0] || largest[1] > max[1])) {
      float down[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        largest[i] = fmaxf(largest[i], max[i]);
        down[i] = ex2_approx(max[i] - largest[i]);
        max[i] = largest[i];
        sum[i] *= down[i];
      }
      multiply(down[0], down[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[i] = ex2_approx(c[i] - max[i % 2]);
      sum[i % 2] += c[i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const half2 w = __floats2half2_rn(c[2 * i] * scales[i], c[2 * i + 1] * scales[i]);
      weights[i] = movmatrix_trans(bits_of(w));
    }
  }
};

// cap * tanh(x), of x = score / cap
__device__ __forceinline__ float cap_of(float x, float cap) {
  return cap * (1.0f - __fdividef(2.0f, 1.0f + ex2_approx(2.885390082f * x)));  // 2 log2(e)
}

// One warp's sums over tiles [first, end) of a row, pinned ones first. queries: [kHeadTiles] for the pinned
// positions and [kHeadTiles] for the others.
template <KvFormat kKeyFormat, KvFormat kValueFormat, int kHeadDim, int kHeadTiles>
__device__ __forceinline__ void sum_tiles(const Seen& seen, int first, int end,
                                          const Rows<kKeyFormat, kHeadDim>& key_rows,
                                          const Rows<kValueFormat, kHeadDim>& value_rows,
                                          const Queries<kKeyFormat, kHeadDim>* queries, float cap,
                                          Sums<kHeadDim> (&sums)[kHeadTiles]) {
  using K = Keys<kKeyFormat, kHeadDim>;
  using V = Values<kValueFormat, kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const Run run = part == 0 ? seen.pinned : seen.moving;
    const int before = part == 0 ? 0 : seen.pinned.tiles();
    // The first of this warp's positions in tile i is 64 i + at. Tiles without any it leaves out.
    const int at = kKeys * warp - run.lead;
    int i = first > before ? first - before : 0;
    if (i == 0 && at + kKeys <= 0) i = 1;
    int last = (run.n - at + kTile - 1) / kTile;
    last = last < end - before ? last : end - before;
    if (run.n <= 0 || i >= last) continue;

    const auto slots_of_keys = [&](int position, int (&slots)[2]) {
      slots[0] = run.slot_of(position + g);
      slots[1] = run.slot_of(position + g + 8);
    };
    int slots[2];
    slots_of_keys(kTile * i + at, slots);
    K keys;
    V values;
    float key_scales[2] = {key_rows.scale(slots[0]), key_rows.scale(slots[1])};
    keys.template load<0>(key_rows, slots, t);
    const Queries<kKeyFormat, kHeadDim>* const here = queries + (run.pinned ? 0 : kHeadTiles);
    float4 columns[kHeadTiles][2];  // of 2t and 2t + 1
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      columns[n][0] = ld_shared(&here[n].columns[2 * t]);
      columns[n][1] = ld_shared(&here[n].columns[2 * t + 1]);
    }

#pragma unroll 1
    for (; i < last; ++i) {
      __syncwarp();  // so that the compiler leaves the queries in shared memory
      const int position = kTile * i + at;
      int value_slots[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) value_slots[r] = run.slot_of(position + 2 * t + r % 2 + r / 2 * 8);
      const float value_scales[2] = {value_rows.scale(slots[0]), value_rows.scale(slots[1])};

      float scores[kHeadTiles][4] = {};
      const auto multiply_keys = [&](int from, int to) {
#pragma unroll
        for (int s = from; s < to; ++s) {
          std::uint32_t a[4];
          keys.fragment(s, a);
#pragma unroll
          for (int n = 0; n < kHeadTiles; ++n) {
            const uint2 q = ld_shared(&here[n].fragments[s][lane]);
            const std::uint32_t b[2] = {q.x, q.y};
            mma_m16n8k16(scores[n], a, b);
          }
        }
      };
      if constexpr (K::kPieces == 2) {
        keys.template load<1>(key_rows, slots, t);
        multiply_keys(0, K::kSteps / 2);
        values.template load<0>(value_rows, value_slots, g);
        multiply_keys(K::kSteps / 2, K::kSteps);
      } else {
        values.template load<0>(value_rows, value_slots, g);
        multiply_keys(0, K::kSteps);
      }

      std::uint32_t weights[kHeadTiles][2];
#pragma unroll
      for (int n = 0; n < kHeadTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int of = position + g + e / 2 * 8;
          const float4& column = columns[n][e % 2];
          float score = fmaf(scores[n][e] * key_scales[e / 2], column.x, of >= run.own ? column.y : column.z);
          if (cap > 0.0f) score = cap_of(score, cap);
          scores[n][e] = of >= 0 && of < run.n ? score : -__uint_as_float(0x7f800000u);
        }
        sums[n].weigh(scores[n], value_scales, weights[n]);
      }

      const auto multiply_values = [&](int from, int to) {
#pragma unroll
        for (int j = from; j < to; ++j) {
          std::uint32_t a[4];
          values.fragment(j, a);
#pragma unroll
          for (int n = 0; n < kHeadTiles; ++n) mma_m16n8k16(sums[n].out[j], a, weights[n]);
        }
      };
      if constexpr (V::kPieces == 2) {
        values.template load<1>(value_rows, value_slots, g);
        multiply_values(0, V::kTiles / 2);
      }
      if (i + 1 < last) {
        slots_of_keys(position + kTile, slots);
        key_scales[0] = key_rows.scale(slots[0]);
        key_scales[1] = key_rows.scale(slots[1]);
        keys.template load<0>(key_rows, slots, t);
      }
      if constexpr (V::kPieces == 2) {
        multiply_values(V::kTiles / 2, V::kTiles);
      } else {
        multiply_values(0, V::kTiles);
      }
    }
  }
}

// ---- sums of warps and of splits

// Sums of the four warps: thread (warp, lane) gets those of fragments warp, warp + 4, .. of the warps' own
// order (head tile, tile), relative to the largest of each column. exchange: [4][kFragments][32] float4.
template <int kHeadDim, int kHeadTiles>
struct BlockSums {
  static constexpr int kFragments = kHeadTiles * kHeadDim / 16;
  static constexpr int kMine = (kFragments + kWarps - 1) / kWarps;
  static constexpr int kHeads = kHeadTiles * kColumns;
  float4 mine[kMine];

  // stats: [4][kHeads] max and sum
  __device__ __forceinline__ void add_warps(Sums<kHeadDim> (&sums)[kHeadTiles], float4* exchange,
                                            float2* stats) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      sums[n].share_sum();
      if (lane < 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          st_shared(&stats[warp * kHeads + n * kColumns + 2 * lane + i],
                    make_float2(sums[n].max[i], sums[n].sum[i]));
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kHeadTiles; ++n) {
      float down[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float largest = of_column(stats, n * kColumns + 2 * (lane % 4) + i).x;
        down[i] = ex2_approx(sums[n].max[i] - largest);
      }
      sums[n].multiply(down[0], down[1]);
#pragma unroll
      for (int j = 0; j < kHeadDim / 16; ++j) {
        st_shared(&exchange[(warp * kFragments + n * (kHeadDim / 16) + j) * 32 + lane],
                  make_float4(sums[n].out[j][0], sums[n].out[j][1], sums[n].out[j][2], sums[n].out[j][3]));
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int fragment = warp + kWarps * k;
      mine[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (fragment >= kFragments) break;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 x = ld_shared(&exchange[(w * kFragments + fragment) * 32 + lane]);
        mine[k].x += x.x;
        mine[k].y += x.y;
        mine[k].z += x.z;
        mine[k].w += x.w;
      }
    }
  }

  // The largest score of a head, and the sum of weights relative to it.
  static __device__ __forceinline__ float2 of_column(const float2* stats, int head) {
    float2 all = make_float2(kLow, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all.x = fmaxf(all.x, ld_shared(&stats[w * kHeads + head]).x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 of_warp = ld_shared(&stats[w * kHeads + head]);
      all.y = fmaf(of_warp.y, ex2_approx(of_warp.x - all.x), all.y);
    }
    return all;
  }

  // f(head, dim, two neighbouring elements) for what the thread has.
  template <class Values, class F>
  __device__ __forceinline__ void for_each_pair(F f) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const int fragment = warp + kWarps * k;
      if (fragment >= kFragments) break;
      const int head = fragment / (kHeadDim / 16) * kColumns + 2 * (lane % 4);
      const int dim = Values::dim(lane / 4, fragment % (kHeadDim / 16));
      f(head, dim, make_float2(mine[k].x, mine[k].z));
      f(head + 1, dim, make_float2(mine[k].y, mine[k].w));
    }
  }
};

// The sums [heads, kHeadDim] of the `active` splits of one row and KV head, divided by their weights, times
// `scale`. from: the first split's part for the first head, `stride` floats before the next split's.
template <int kHeadDim>
__device__ __forceinline__ void add_splits(const float* from, std::int64_t stride, int active, int heads,
                                           float scale, float* out) {
  for (int i = static_cast<int>(threadIdx.x); i < heads * (kHeadDim / 2); i += kWarps * 32) {
    const int head = i / (kHeadDim / 2), dim = 2 * (i % (kHeadDim / 2));
    const float* const part = from + head * (kHeadDim + 2);
    const auto stats = [&](int s) {
      return ld_global(reinterpret_cast<const float2*>(part + s * stride + kHeadDim));
    };
    float largest = kLow;
    for (int s = 0; s < active; ++s) largest = fmaxf(largest, stats(s).x);
    float weight = 0.0f;
    float2 sum = make_float2(0.0f, 0.0f);
    for (int s = 0; s < active; ++s) {
      const float2 of = stats(s), x = ld_global(reinterpret_cast<const float2*>(part + s * stride + dim));
      const float down = ex2_approx(of.x - largest);
      weight = fmaf(of.y, down, weight);
      sum.x = fmaf(x.x, down, sum.x);
      sum.y = fmaf(x.y, down, sum.y);
    }
    const float each = scale / weight;
    st_shared(reinterpret_cast<float2*>(out + head * kHeadDim + dim),
              make_float2(sum.x * each, sum.y * each));
  }
}

// From out [heads, kHeadDim] in shared memory, all threads behind a barrier, to att and its quantized blocks.
// `first`: the first element's place in row m.
template <KvFormat kValueFormat, int kHeadDim>
__device__ __forceinline__ void finish(const Attend& a, int m, int first, int heads, float* out) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if constexpr (kValueFormat == KvFormat::Int8) {
    for (int head = warp; head < heads; head += kWarps) {
      rotate_back<kHeadDim>(out + head * kHeadDim, rsqrtf(static_cast<float>(kHeadDim)));
    }
    __syncthreads();
  }
  float* const att = a.att + std::int64_t{m} * a.n_head * kHeadDim + first;
  for (int i = thread; i < heads * kHeadDim; i += kWarps * 32) st_global(att + i, ld_shared(out + i));
  if (a.out.digits == nullptr) return;
  for (int block = warp; block < heads * kHeadDim / kBlock; block += kWarps) {
    quantize_block(a.out, m, first / kBlock + block, ld_shared(out + block * kBlock + lane));
  }
}

}  // namespace attention

// out.digits is null, or a group's heads are whole blocks of it.
template <KvFormat kKeyFormat, KvFormat kValueFormat, int kHeadDim, int kHeadTiles>
__global__ void __launch_bounds__(128, attention::blocks_of_an_sm(kKeyFormat, kValueFormat, kHeadDim,
                                                                  kHeadTiles)) attend_kernel(Attend a) {
  using namespace attention;
  using Block = BlockSums<kHeadDim, kHeadTiles>;
  using Query = Queries<kKeyFormat, kHeadDim>;
  // One behind the other: the queries, the sums of the warps, and the result [heads, kHeadDim].
  SMEM_STATIC(float4, exchange, kWarps * Block::kFragments * 32);
  static_assert(2 * kHeadTiles * sizeof(Query) <= kWarps * Block::kFragments * 32 * sizeof(float4));
  Query* const queries = reinterpret_cast<Query*>(exchange);
  SMEM_STATIC(float2, stats, kWarps * Block::kHeads);
  SMEM_STATIC(unsigned, place, 1);
  float* const out = reinterpret_cast<float*>(exchange);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int group = a.n_head / a.n_head_kv, parts = (group + Block::kHeads - 1) / Block::kHeads;
  const int kv_head = static_cast<int>(blockIdx.x) / parts;
  const int first_head = static_cast<int>(blockIdx.x) % parts * Block::kHeads;  // of the group
  const int heads = group - first_head < Block::kHeads ? group - first_head : Block::kHeads;
  const int split = static_cast<int>(blockIdx.y), m = static_cast<int>(blockIdx.z);

  const DeviceRow* const row = a.rows + m;
  const KvLayer* const layer = ld_global(&row->layers) + a.layer;
  const Seen seen = seen_by(row, layer, a.offsets != nullptr);
  const int tiles = seen.tiles();
  const int each = (tiles + a.splits - 1) / a.splits, active = (tiles + each - 1) / each;
  if (split >= active) return;

  const std::int64_t capacity = ld_global(&layer->capacity);
  const Rows<kKeyFormat, kHeadDim> keys{
      ld_global(&layer->k) + kv_head * capacity * (kHeadDim * kBytes<kKeyFormat>),
      ld_global(&layer->k_scales) + (kKeyFormat == KvFormat::Int8 ? kv_head * capacity * 2 : 0)};
  const Rows<kValueFormat, kHeadDim> values{
      ld_global(&layer->v) + kv_head * capacity * (kHeadDim * kBytes<kValueFormat>),
      ld_global(&layer->v_scales) + (kValueFormat == KvFormat::Int8 ? kv_head * capacity * 2 : 0)};
  // Products to scores to base 2: factor * product, or cap * tanh(factor * product).
  constexpr float kLog2e = 1.442695041f;
  const bool capped = a.softcap > 0.0f;
  const float factor = capped ? a.scale / a.softcap : a.scale * kLog2e,
              cap = capped ? a.softcap * kLog2e : 0.0f;
  const std::int64_t head = std::int64_t{m} * a.n_head + kv_head * group + first_head;
  if (const int n = warp % kHeadTiles; warp < 2 * kHeadTiles) {
    const std::int64_t at = head + n * kColumns;
    const bool pinned = warp < kHeadTiles;
    queries[warp].fill((pinned ? a.q_pinned : a.q) + at * kHeadDim,
                       a.offsets != nullptr ? a.offsets + at * kEpochs : nullptr, heads - n * kColumns,
                       pinned, factor);
  }
  __syncthreads();

  Sums<kHeadDim> sums[kHeadTiles];
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) sums[n].clear();
  const int end = each * (split + 1);
  sum_tiles(seen, each * split, end < tiles ? end : tiles, keys, values, queries, cap, sums);
  Block block;
  block.add_warps(sums, exchange, stats);

  if (active == 1 && parts == 1) {
    __syncthreads();  // all have read `exchange`
    block.template for_each_pair<Values<kValueFormat, kHeadDim>>([&](int h, int dim, float2 x) {
      if (h >= heads) return;
      const float weight = 1.0f / Block::of_column(stats, h).y;
      st_shared(reinterpret_cast<float2*>(out + h * kHeadDim + dim), make_float2(x.x * weight, x.y * weight));
    });
    __syncthreads();
    finish<kValueFormat, kHeadDim>(a, m, kv_head * group * kHeadDim, heads, out);
    return;
  }

  const std::int64_t stride = std::int64_t{group} * (kHeadDim + 2);  // of a split
  const std::int64_t pair = std::int64_t{m} * a.n_head_kv + kv_head;
  float* const partial = a.partial + pair * a.splits * stride;
  float* const mine = partial + split * stride + first_head * (kHeadDim + 2);
  block.template for_each_pair<Values<kValueFormat, kHeadDim>>([&](int h, int dim, float2 x) {
    if (h < heads) st_global(reinterpret_cast<float2*>(mine + h * (kHeadDim + 2) + dim), x);
  });
  if (thread < heads) {
    st_global(reinterpret_cast<float2*>(mine + thread * (kHeadDim + 2) + kHeadDim),
              Block::of_column(stats, thread));
  }
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    st_shared(place, atomicAdd(a.arrived + pair, 1u));
    __threadfence();
  }
  __syncthreads();
  if (ld_shared(place) != static_cast<unsigned>(active * parts - 1)) return;
  for (int h = 0; h < group; h += Block::kHeads) {
    const int some = group - h < Block::kHeads ? group - h : Block::kHeads;
    add_splits<kHeadDim>(partial + h * (kHeadDim + 2), stride, active, some, 1.0f, out);
    __syncthreads();
    finish<kValueFormat, kHeadDim>(a, m, (kv_head * group + h) * kHeadDim, some, out);
    __syncthreads();
  }
  if (thread == 0) st_global(a.arrived + pair, 0u);
}

}  // namespace ringlm::cuda

// Attention of a prefill chunk: M rows that are consecutive positions of one session.
//   att[m][h] = sum over seen t of softmax_t(cap(scale (q[m][h] . K_t + offset))) V_t,   rotated back for
//   INT8
//
// Mapping. A block of four warps owns one KV head and 64 rows of queries, row = token * group + head of the
// group, so any group fills its tiles and a tile's tokens are neighbours. Warp w has rows 16 w .. 16 w + 15,
// as fragments of A. The block walks over what its queries see, in aligned tiles of kTile positions: first
// the pinned ones, scored by q_pinned, then the moving ones, from the oldest that its first token sees to its
// last token. A tile of K and one of V are staged in shared memory as halves, INT8 codes exactly; both
// products are m16n8k16. Accumulators of S are the fragments of A that P needs. The softmax is online, in
// base 2.
//
// Scales of INT8 rows. K's multiplies the score. V's is part of the exponent, so that P with its scale,
//   P = 2^(s + log2(scale) - max),
// has a largest element of 1 for whatever scale, and loses no bits as a half; the sum of weights takes P /
// scale.
//
// Floor: q and att once, K and V of the seen positions once per KV head and block: a tile serves 64 rows.
// Shared memory: two tiles, rows padded by 16 bytes so that eight of them lie in different banks; at head
// size 256 five of the sixteen fragments of Q; and what the rows see: 20 to 31 KB. No bank conflicts in the
// loop. Registers: 144 to 168 up to head size 128 (three blocks an SM), 255 at 256 (two); no spills. Shapes:
// head sizes 64, 80, 96, 128, 256; any group, M and ring; K and V INT8 or F16, whose planes are 16-byte
// aligned. Queries become halves: those above 65504 are not finite, which check_finite finds.
#pragma once

#include "cuda/launch.h"
#include "cuda/port.h"
#include "cuda/tile_rotation.h"

namespace ringlm::cuda {

constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps;
constexpr int kPrefillRows = 16 * kPrefillWarps;  // of queries, in a block

template <int kHeadDim>
struct PrefillShape {
  // Positions in a tile. Aligned to it, a tile lies in one epoch, which is a multiple of 64.
  static constexpr int kTile = kHeadDim <= 64 ? 64 : kHeadDim <= 128 ? 32 : 16;
  static constexpr int kStride = kHeadDim + 8;  // halves
  // Fragments of queries, 16 dims each. Some of head size 256 stay in shared memory, for want of registers.
  static constexpr int kFragments = kHeadDim / 16;
  static constexpr int kInRegisters = kHeadDim <= 128 ? kFragments : kFragments - 5;
  static constexpr std::size_t kSharedBytes =
      2 * kTile * kStride * sizeof(half) + (kFragments - kInRegisters) * kPrefillThreads * sizeof(uint4);
  static constexpr int kBlocksPerSm = kHeadDim <= 128 ? 3 : 2;
};

// Biased codes to halves, exactly: a code under the exponent of 1024 is 1024 + code.
__device__ __forceinline__ std::uint32_t two_codes(std::uint32_t bytes) {
  const half2 zero = __half2half2(__ushort_as_half(0x6480));  // 1024 + 128
  return bits_as<std::uint32_t>(__hsub2(bits_as<half2>(bytes), zero));
}
__device__ __forceinline__ uint4 eight_codes(uint2 codes) {
  uint4 halves;
  halves.x = two_codes(__byte_perm(codes.x, 0x64646464u, 0x4140));
  halves.y = two_codes(__byte_perm(codes.x, 0x64646464u, 0x4342));
  halves.z = two_codes(__byte_perm(codes.y, 0x64646464u, 0x4140));
  halves.w = two_codes(__byte_perm(codes.y, 0x64646464u, 0x4342));
  return halves;
}

__device__ __forceinline__ std::uint32_t pair_of_halves(float low, float high) {
  return bits_as<std::uint32_t>(__floats2half2_rn(low, high));
}

// The positions of a part that a row sees, and its offsets for keys of its own epoch and of the one before,
// times the factor of scores.
struct alignas(8) RowSeen {
  int first, last;
};
struct alignas(16) RowOffsets {
  int own_epoch;  // its first position
  float own, previous, unused;
};

// Positions [begin, end) of one part of the ring, pinned or moving, as a block walks over them. Positions are
// counted from one that is aligned to tiles.
struct PrefillPart {
  int begin, end;
  int first_slot;        // of `begin`
  int wrap, capacity;    // slots to go back at the end of the ring
  int all_from, all_to;  // the first and last position that every row of the block sees
  RowSeen seen[kPrefillRows];
  RowOffsets offsets[kPrefillRows];

  __device__ __forceinline__ bool has(int t) const { return t >= begin && t < end; }
  // There are no more positions than slots, so one step back is enough.
  __device__ __forceinline__ int slot(int t) const {
    const int slot = first_slot + (t - begin);
    return slot < capacity ? slot : slot - wrap;
  }
};

// Rows at .. at + kTile - 1 of K or V on their way to shared memory, as halves: fetch() asks for them,
// store() is called when others have been asked for too. Rows that the part does not have become zeros, for
// nobody may have written them yet. A thread moves eight elements at a time.
template <int kHeadDim>
struct StagedRows {
  using Shape = PrefillShape<kHeadDim>;
  static constexpr unsigned kChunks = kHeadDim / 8, kAll = Shape::kTile * kChunks;
  static constexpr unsigned kEach = (kAll + kPrefillThreads - 1) / kPrefillThreads;

  uint2 codes[kEach];  // INT8

  __device__ __forceinline__ void fetch(const PrefillPart& part, int at, const std::uint8_t* rows,
                                        KvFormat format, half* to) {
    const auto place = [&](unsigned chunk) {  // of its first element in the cache
      const int slot = part.slot(at + static_cast<int>(chunk / kChunks));
      return static_cast<std::size_t>(slot) * kHeadDim + chunk % kChunks * 8;
    };
    const auto has = [&](unsigned chunk) { return part.has(at + static_cast<int>(chunk / kChunks)); };
    if (format == KvFormat::Int8) {
#pragma unroll
      for (unsigned i = 0; i < kEach; ++i) {
        const unsigned chunk = threadIdx.x + i * kPrefillThreads;
        codes[i] = make_uint2(0x80808080u, 0x80808080u);
        if (chunk < kAll && has(chunk))
          codes[i] = ld_global(reinterpret_cast<const uint2*>(rows + place(chunk)));
      }
    } else {
#pragma unroll
      for (unsigned i = 0; i < kEach; ++i) {
        const unsigned chunk = threadIdx.x + i * kPrefillThreads;
        if (chunk >= kAll) break;
        half* const chunk_to = to + chunk / kChunks * Shape::kStride + chunk % kChunks * 8;
        if (has(chunk)) {
          cp_async16(chunk_to, rows + 2 * place(chunk));
        } else {
          st_shared(reinterpret_cast<uint4*>(chunk_to), uint4{});
        }
      }
    }
  }

  __device__ __forceinline__ void store(KvFormat format, half* to) const {
    if (format != KvFormat::Int8) return;
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i) {
      const unsigned chunk = threadIdx.x + i * kPrefillThreads;
      if (chunk >= kAll) break;
      half* const chunk_to = to + chunk / kChunks * Shape::kStride + chunk % kChunks * 8;
      st_shared(reinterpret_cast<uint4*>(chunk_to), eight_codes(codes[i]));
    }
  }
};

// tanh(x) = 1 - 2 / (1 + e^2x), to about 1e-7.
__device__ __forceinline__ float tanh_by_ex2(float x) {
  constexpr float kTwoLog2E = 2.885390082f;
  return 1.0f - __fdividef(2.0f, 1.0f + ex2_approx(kTwoLog2E * x));
}

// What a block's rows see of both parts, in shared memory.
struct PrefillView {
  PrefillPart parts[2];       // pinned, moving
  int queries[kPrefillRows];  // of [M, n_head]
  const std::uint8_t *k, *v;  // of the block's KV head
  const half *k_scales, *v_scales;
  // factor (q . k + offset) is a score in base 2, or what the soft cap's tanh is taken of.
  float factor;
};
constexpr float kLog2E = 1.442695041f;

// Every thread does one row of one part, and the first one what all share.
template <int kHeadDim>
__device__ __forceinline__ void look(const Attend& a, const KvLayer* layer, PrefillView& view) {
  static_assert(kPrefillThreads == 2 * kPrefillRows);
  constexpr int kTile = PrefillShape<kHeadDim>::kTile;
  const int thread = static_cast<int>(threadIdx.x), moving = thread / kPrefillRows;
  const int of_block = thread % kPrefillRows;
  const std::int64_t visible = ld_global(&layer->visible), pinned = ld_global(&layer->pinned);
  const std::int64_t capacity = ld_global(&layer->capacity), turning = capacity - pinned;
  const std::int64_t chunk_first = ld_global(&a.rows->position), epoch = ld_global(&a.rows->epoch);
  const auto oldest = [&](std::int64_t p) { return max(pinned, p - (visible - pinned) + 1); };
  const auto newest = [&](std::int64_t p) { return moving ? p : min(p, pinned - 1); };

  // Behind the last row there are copies of it, which nobody writes.
  const int group = a.n_head / a.n_head_kv, n_rows = a.M * group;
  const int block_row = static_cast<int>(blockIdx.y) * kPrefillRows;
  const int row = min(block_row + of_block, n_rows - 1), token = row / group;
  const std::int64_t p = chunk_first + token, first_p = chunk_first + block_row / group;
  const std::int64_t last_p = chunk_first + (min(block_row + kPrefillRows, n_rows) - 1) / group;

  const std::int64_t begin = moving ? oldest(first_p) : 0, base = begin / kTile * kTile;
  const auto from_base = [&](std::int64_t t) { return static_cast<int>(t - base); };
  PrefillPart& part = view.parts[moving];
  if (of_block == 0) {
    part.begin = from_base(begin);
    part.end = from_base(newest(last_p) + 1);
    part.first_slot = moving ? static_cast<int>(pinned + (begin - pinned) % turning) : 0;
    part.wrap = static_cast<int>(turning);
    part.capacity = static_cast<int>(capacity);
    part.all_from = from_base(moving ? oldest(last_p) : 0);
    part.all_to = from_base(newest(first_p));
  }
  part.seen[of_block] = {from_base(moving ? oldest(p) : 0), from_base(newest(p))};
  const float factor = a.softcap > 0.0f ? __fdividef(a.scale, a.softcap) : a.scale * kLog2E;
  const int query = token * a.n_head + static_cast<int>(blockIdx.x) * group + row % group;
  if (!moving) view.queries[of_block] = query;
  if (thread == 0) {
    view.factor = factor;
    const std::int64_t before = blockIdx.x * capacity;  // rows of the heads before this one
    const auto bytes = [](KvFormat format) { return format == KvFormat::Int8 ? 1 : 2; };
    view.k = ld_global(&layer->k) + before * kHeadDim * bytes(a.k_format);
    view.v = ld_global(&layer->v) + before * kHeadDim * bytes(a.v_format);
    view.k_scales = reinterpret_cast<const half*>(ld_global(&layer->k_scales)) + before;
    view.v_scales = reinterpret_cast<const half*>(ld_global(&layer->v_scales)) + before;
  }
  if (a.offsets == nullptr) return;
  const float* const offsets = a.offsets + static_cast<std::int64_t>(query) * kEpochs;
  part.offsets[of_block] = {from_base(p / epoch * epoch), factor * ld_global(offsets + (moving ? 0 : 2)),
                            factor * ld_global(offsets + (moving ? 1 : 2)), 0.0f};
}

template <int kHeadDim>
__global__ void __launch_bounds__(kPrefillThreads, PrefillShape<kHeadDim>::kBlocksPerSm)
    prefill_attention_kernel(const Attend a) {
  using Shape = PrefillShape<kHeadDim>;
  constexpr int kTile = Shape::kTile, kStride = Shape::kStride;
  constexpr int kInRegisters = Shape::kInRegisters;
  constexpr float kLowest = -3.0e38f;
  SMEM_DYN(half, k_tile);  // [kTile][kStride], and V behind it
  SMEM_STATIC(float, k_factors, kTile);
  SMEM_STATIC(float, v_logs, kTile);      // log2 of the row's scale
  SMEM_STATIC(float, v_inverses, kTile);  // 1 / scale
  SMEM_STATIC(PrefillView, views, 1);
  PrefillView& view = views[0];
  half* const v_tile = k_tile + kTile * kStride;
  // The fragments of queries that are not in registers, [..][4][thread]: each thread's own.
  std::uint32_t* const other_q = reinterpret_cast<std::uint32_t*>(v_tile + kTile * kStride) + threadIdx.x;

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int in_quad = lane % 4, quad = lane / 4;
  const int lane_row = 16 * warp + quad;  // this lane has that row of the block and the eighth after it

  // The row of this lane in 16 positions by 16 dims as four matrices: positions 0-7 of dims 0-7 and 8-15,
  // then positions 8-15.
  const int of_matrices = (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8;

  look<kHeadDim>(a, ld_global(&a.rows->layers) + a.layer, view);
  __syncthreads();

  float o[kHeadDim / 8][4] = {};
  float largest[2] = {kLowest, kLowest}, sum = 0.0f;
  const bool odd = lane % 2 != 0;
#pragma unroll 1
  for (int moving = 0; moving < 2; ++moving) {
    const PrefillPart& part = view.parts[moving];
    if (part.begin >= part.end) continue;

    std::uint32_t q[kInRegisters][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const from = (moving ? a.q : a.q_pinned) +
                                static_cast<std::int64_t>(view.queries[lane_row + 8 * r]) * kHeadDim +
                                2 * in_quad;
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        const float2 two = ld_global(reinterpret_cast<const float2*>(from + 8 * i));
        const std::uint32_t pair = pair_of_halves(two.x, two.y);
        const int word = i % 2 * 2 + r;
        if (i / 2 < kInRegisters) {
          q[i / 2 % kInRegisters][word] = pair;
        } else {
          st_shared(&other_q[(4 * (i / 2 - kInRegisters) + word) * kPrefillThreads], pair);
        }
      }
    }

    for (int at = 0; at < part.end; at += kTile) {
      __syncthreads();  // the tile before has been read
      StagedRows<kHeadDim> k_rows, v_rows;
      k_rows.fetch(part, at, view.k, a.k_format, k_tile);
      v_rows.fetch(part, at, view.v, a.v_format, v_tile);
      cp_async_commit();
      if (thread < kTile) {
        float k_scale = 1.0f, v_scale = 1.0f;
        if (part.has(at + thread)) {
          const int slot = part.slot(at + thread);
          if (a.k_format == KvFormat::Int8) k_scale = __half2float(ld_global(view.k_scales + slot));
          if (a.v_format == KvFormat::Int8) v_scale = __half2float(ld_global(view.v_scales + slot));
        }
        if (v_scale == 0.0f) v_scale = 1.0f;  // so are all codes
        st_shared(&k_factors[thread], view.factor * k_scale);
        st_shared(&v_logs[thread], log2f(v_scale));
        st_shared(&v_inverses[thread], __fdividef(1.0f, v_scale));
      }
      k_rows.store(a.k_format, k_tile);
      v_rows.store(a.v_format, v_tile);
      cp_async_wait<0>();
      __syncthreads();

      float s[kTile / 8][4] = {};
      const auto multiply = [&](int i, const std::uint32_t (&fragment)[4]) {
#pragma unroll
        for (int n = 0; n < kTile / 16; ++n) {
          std::uint32_t b[4];
          ldmatrix_x4(b, k_tile + 16 * n * kStride + 16 * i + of_matrices);
          mma_m16n8k16(s[2 * n], fragment, {b[0], b[1]});
          mma_m16n8k16(s[2 * n + 1], fragment, {b[2], b[3]});
        }
      };
#pragma unroll
      for (int i = 0; i < kInRegisters; ++i) multiply(i, q[i]);
#pragma unroll
      for (int i = kInRegisters; i < Shape::kFragments; ++i) {
        std::uint32_t fragment[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          fragment[word] = ld_shared(&other_q[(4 * (i - kInRegisters) + word) * kPrefillThreads]);
        }
        multiply(i, fragment);
      }

      float offset[2] = {};
      if (a.offsets != nullptr) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const RowOffsets of_row = ld_shared(&part.offsets[lane_row + 8 * r]);
          offset[r] = at >= of_row.own_epoch ? of_row.own : of_row.previous;
        }
      }
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const float2 factors = ld_shared(reinterpret_cast<const float2*>(&k_factors[8 * n + 2 * in_quad]));
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = s[n][i] * (i % 2 ? factors.y : factors.x) + offset[i / 2];
      }
      if (a.softcap > 0.0f) {
        const float cap = a.softcap * kLog2E;
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s[n][i] = cap * tanh_by_ex2(s[n][i]);
        }
      }
      if (at < part.all_from || at + kTile - 1 > part.all_to) {
        const RowSeen of_row[2] = {ld_shared(&part.seen[lane_row]), ld_shared(&part.seen[lane_row + 8])};
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int t = at + 8 * n + 2 * in_quad + i % 2;
            if (t < of_row[i / 2].first || t > of_row[i / 2].last) s[n][i] = -INFINITY;
          }
        }
      }
      float tile_largest[2] = {largest[0], largest[1]};
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const float2 logs = ld_shared(reinterpret_cast<const float2*>(&v_logs[8 * n + 2 * in_quad]));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] += i % 2 ? logs.y : logs.x;
          tile_largest[i / 2] = fmaxf(tile_largest[i / 2], s[n][i]);
        }
      }
      float keep[2], tile_sum[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tile_largest[r] = warp_max<4>(tile_largest[r]);
        keep[r] = ex2_approx(largest[r] - tile_largest[r]);
        largest[r] = tile_largest[r];
      }
      const bool moved = warp_any(kFullWarp, keep[0] != 1.0f || keep[1] != 1.0f);
      if (moved) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) o[n][i] *= keep[i / 2];
        }
      }
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        const float2 inverses = ld_shared(reinterpret_cast<const float2*>(&v_inverses[8 * n + 2 * in_quad]));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = ex2_approx(s[n][i] - largest[i / 2]);
          tile_sum[i / 2] += s[n][i] * (i % 2 ? inverses.y : inverses.x);
        }
      }

      // A lane keeps the sum of one of its rows, over its columns and those of the lane next to it.
      const float theirs = shfl_xor(kFullWarp, odd ? tile_sum[0] : tile_sum[1], 1);
      sum = odd ? sum * keep[1] + (tile_sum[1] + theirs) : sum * keep[0] + (tile_sum[0] + theirs);

      std::uint32_t weights[kTile / 16][4];
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
        weights[n / 2][n % 2 * 2] = pair_of_halves(s[n][0], s[n][1]);
        weights[n / 2][n % 2 * 2 + 1] = pair_of_halves(s[n][2], s[n][3]);
      }
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 16; ++i) {
          // Loads of ldmatrix that ran further ahead would take registers that are not there.
          if (kHeadDim > 128 && i % 4 == 0) __syncwarp();
          std::uint32_t b[4];
          ldmatrix_x4_trans(b, v_tile + 16 * n * kStride + 16 * i + of_matrices);
          mma_m16n8k16(o[2 * i], weights[n], {b[0], b[2]});
          mma_m16n8k16(o[2 * i + 1], weights[n], {b[1], b[3]});
        }
      }
    }
  }

  sum += shfl_xor(kFullWarp, sum, 2);
  const float inverse = __fdividef(1.0f, sum);
  float inverses[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) inverses[r] = shfl(kFullWarp, inverse, r, 4);
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] *= inverses[i / 2];
  }
  if (a.v_format == KvFormat::Int8) rotate_back_rows<kHeadDim>(o, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = static_cast<int>(blockIdx.y) * kPrefillRows + lane_row + 8 * r;
    if (row >= a.M * (a.n_head / a.n_head_kv)) continue;
    float* const to =
        a.att + static_cast<std::int64_t>(view.queries[lane_row + 8 * r]) * kHeadDim + 2 * in_quad;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      st_global(reinterpret_cast<float2*>(to + 8 * n), make_float2(o[n][2 * r], o[n][2 * r + 1]));
    }
  }
}

}  // namespace ringlm::cuda

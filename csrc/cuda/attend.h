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
// return at once. The last block to end adds up the sums of all. A warp takes 16 positions of every tile, for
// 8 or 16 query heads ("columns"). With g = lane / 4 and t = lane % 4, on tensor cores (fragments as in
// port.h):
//   - scores [16 keys, 8 columns] = K q: the lane loads its quarter t of rows g and g + 8 in pieces of 16
//     bytes. The head dimension is summed over, so its order is free: that in which lanes find the bytes.
//   - out [16 dims, 8 columns] = V^T w: the lane loads its eighth g of rows 2t, 2t + 1, 2t + 8, 2t + 9. Which
//     dims make up the 16 is free as well. w goes from scores to here by a transpose in registers.
// A group of less than 8 heads leaves columns empty. The loop takes, at head size 128, of INT8 rows 28
// instructions a key and KV head on sm_87 and 29 on sm_75, of F16 rows 23 and 24; an Orin has about 75 for
// INT8 at its full bandwidth, so a group of one has no kernel of its own. Groups of more than 16, or of more
// than 8 at head size 256 or with K and V in different formats, take several head tiles, each of which reads
// K and V again, from L2.
//
// Numbers: q and w are halves, off by 2^-12 at most. q is divided by a power of two that brings its head's
// largest below 2^14. w is multiplied by the scale of its value, and relative to the largest such product so
// far, times 2^13, so that small weights of many keys keep their bits. Codes of INT8 are exact halves. All
// sums are float32.
//
// Loads run ahead: values of a tile arrive while scores are computed, keys of the next one during values.
// Where 16 F16 rows would take 32 registers or more they come in two pieces. Queries stay in shared memory.
// At head size 128: 128 registers and 17 KiB of shared memory on sm_87, four blocks an SM; three on sm_75.
//
// Shapes: head sizes 64, 80, 96, 128 and 256; K and V each INT8 or F16; any group, number of splits and ring.
// Rows of K and V begin at multiples of 16 bytes.
#pragma once

#include "cuda/attend_rows.h"
#include "cuda/attend_sums.h"

namespace ringlm::cuda {

namespace attention {

// The power of two that brings `largest` below 2^14, as Halves has it.
__device__ __forceinline__ float step_of(float largest) {
  const std::uint32_t bits = __float_as_uint(largest) & 0x7f800000u, least = 27u << 23;
  return __uint_as_float((bits > least ? bits : least) - (13u << 23));
}
__device__ __forceinline__ float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
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

// Tiles of a split, so that there are at most `splits` of them. All blocks read their tiles at once, then the
// last one reads everybody's sums; both together take least when a block's tiles are as many bytes as all
// sums.
template <KvFormat kKeyFormat, KvFormat kValueFormat, int kHeadDim>
__device__ __forceinline__ int tiles_of_split(int tiles, int splits, int group) {
  constexpr int kRow = kHeadDim * (kBytes<kKeyFormat> + kBytes<kValueFormat>);
  constexpr int kScales = 2 * (kKeyFormat == KvFormat::Int8) + 2 * (kValueFormat == KvFormat::Int8);
  constexpr float kSums = 4.0f * (kHeadDim + 2) / (kTile * (kRow + kScales));  // of a head, over a tile
  const int least = (tiles + splits - 1) / splits;
  const int best = static_cast<int>(sqrtf(static_cast<float>(tiles * group) * kSums));
  return least > best ? least : best;
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
  SMEM_STATIC(float4, exchange, Block::kExchange);
  static_assert(2 * kHeadTiles * sizeof(Query) <= Block::kExchange * sizeof(float4));
  static_assert(Block::kHeads * kHeadDim * sizeof(float) <= Block::kExchange * sizeof(float4));
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
  const int each = tiles_of_split<kKeyFormat, kValueFormat, kHeadDim>(tiles, a.splits, group);
  const int active = (tiles + each - 1) / each;
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
  const float factor = capped ? a.scale / a.softcap : a.scale * kLog2e;
  const float cap = capped ? a.softcap * kLog2e : 0.0f;
  const std::int64_t head = std::int64_t{m} * a.n_head + kv_head * group + first_head;
  const int first = each * split, end = first + each < tiles ? first + each : tiles;
  const bool pinned = warp < kHeadTiles;  // what this warp prepares, if the split has such tiles
  if (warp < 2 * kHeadTiles && (pinned ? first < seen.pinned.tiles() : end > seen.pinned.tiles())) {
    const int n = warp % kHeadTiles;
    const std::int64_t at = head + n * kColumns;
    queries[warp].fill((pinned ? a.q_pinned : a.q) + at * kHeadDim,
                       a.offsets != nullptr ? a.offsets + at * kEpochs : nullptr, heads - n * kColumns,
                       pinned, factor);
  }
  __syncthreads();

  Sums<kHeadDim> sums[kHeadTiles];
#pragma unroll
  for (int n = 0; n < kHeadTiles; ++n) sums[n].clear();
  sum_tiles(seen, first, end, keys, values, queries, cap, sums);
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

  const Splits<kHeadDim> sums_of(a, m, kv_head);
  unsigned* const arrived = a.arrived + m * a.n_head_kv + kv_head;
  block.template for_each_pair<Values<kValueFormat, kHeadDim>>([&](int h, int dim, float2 x) {
    if (h < heads) st_global(reinterpret_cast<float2*>(sums_of.out_of(split, first_head + h) + dim), x);
  });
  if (thread < heads) st_global(sums_of.all_of(split, first_head + thread), Block::of_column(stats, thread));
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    st_shared(place, atomicAdd(arrived, 1u));
    __threadfence();
  }
  __syncthreads();
  if (ld_shared(place) != static_cast<unsigned>(active * parts - 1)) return;
  for (int h = 0; h < group; h += Block::kHeads) {
    const int some = group - h < Block::kHeads ? group - h : Block::kHeads;
    add_splits(sums_of, active, h, some, stats, out);
    __syncthreads();
    finish<kValueFormat, kHeadDim>(a, m, (kv_head * group + h) * kHeadDim, some, out);
    __syncthreads();
  }
  if (thread == 0) st_global(arrived, 0u);
}

}  // namespace ringlm::cuda

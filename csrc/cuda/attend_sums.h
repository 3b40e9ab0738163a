// Softmax sums of attention: of a warp, of a block, and of the splits of a row. See attend.h.
#pragma once

#include "cuda/attend_rows.h"
#include "cuda/quantize.h"
#include "cuda/rotation.h"

namespace ringlm::cuda::attention {

// The exponent of x >= 0; of 0, that of the least half.
__device__ __forceinline__ float exponent_of(float x) {
  const int exponent = static_cast<int>(__float_as_uint(x) >> 23) - 127;
  return static_cast<float>(exponent > -24 ? exponent : -24);
}

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

// ---- sums of warps and of splits

// Sums of the four warps, relative to the largest of each column. Fragments are tiles of 16 dims of a head
// tile, in the order (head tile, tile); thread (warp, lane) gets the lane's part of every fourth, from `warp`
// on. They go through shared memory in rounds of at most 8.
template <int kHeadDim, int kHeadTiles>
struct BlockSums {
  static constexpr int kTiles = kHeadDim / 16, kFragments = kHeadTiles * kTiles;
  static constexpr int kRounds = kFragments > 8 ? 2 : 1, kEach = kFragments / kRounds;
  static constexpr int kMine = (kEach + kWarps - 1) / kWarps;
  static constexpr int kHeads = kHeadTiles * kColumns;
  static constexpr int kExchange = kWarps * kEach * 32;
  float4 mine[kRounds][kMine];

  // exchange [kExchange]; stats [4][kHeads] of each warp: max and sum
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
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      if (round > 0) __syncthreads();
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int fragment = round * kEach + i;
        const float (&x)[4] = sums[fragment / kTiles].out[fragment % kTiles];
        st_shared(&exchange[(warp * kEach + i) * 32 + lane], make_float4(x[0], x[1], x[2], x[3]));
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        float4& sum = mine[round][k];
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (warp + kWarps * k >= kEach) break;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float4 x = ld_shared(&exchange[(w * kEach + warp + kWarps * k) * 32 + lane]);
          sum.x += x.x;
          sum.y += x.y;
          sum.z += x.z;
          sum.w += x.w;
        }
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
    for (int round = 0; round < kRounds; ++round) {
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        if (warp + kWarps * k >= kEach) break;
        const int fragment = round * kEach + warp + kWarps * k;
        const int head = fragment / kTiles * kColumns + 2 * (lane % 4);
        const int dim = Values::dim(lane / 4, fragment % kTiles);
        const float4 x = mine[round][k];
        f(head, dim, make_float2(x.x, x.z));
        f(head + 1, dim, make_float2(x.y, x.w));
      }
    }
  }
};

// Sums of the splits of one row and KV head, as their blocks leave them.
template <int kHeadDim>
struct Splits {
  float* out;      // [splits, group, kHeadDim]
  float2* of_all;  // [splits, group] the largest score, and the sum of weights relative to it
  int group;

  __device__ __forceinline__ Splits(const Attend& a, int m, int kv_head) : group(a.n_head / a.n_head_kv) {
    const std::int64_t first = (std::int64_t{m} * a.n_head_kv + kv_head) * a.splits * group;
    out = a.partial + first * kHeadDim;
    of_all =
        reinterpret_cast<float2*>(a.partial + std::int64_t{a.M} * a.n_head * a.splits * kHeadDim) + first;
  }
  __device__ __forceinline__ float* out_of(int split, int head) const {
    return out + (split * group + head) * kHeadDim;
  }
  __device__ __forceinline__ float2* all_of(int split, int head) const {
    return of_all + split * group + head;
  }
};

// The sums of the first `active` splits, divided by their weights, into out [heads, kHeadDim] in shared
// memory. scales [heads] is shared memory, too. Loads do not wait for one another: all of this is latency.
template <int kHeadDim>
__device__ __forceinline__ void add_splits(const Splits<kHeadDim>& from, int active, int first_head,
                                           int heads, float2* scales, float* out) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  for (int head = warp; head < heads; head += kWarps) {
    float2 mine = make_float2(kLow, 0.0f);
    for (int s = lane; s < active; s += 32) {
      const float2 of = ld_global(from.all_of(s, first_head + head));
      const float largest = fmaxf(mine.x, of.x);
      mine.y = fmaf(mine.y, ex2_approx(mine.x - largest), of.y * ex2_approx(of.x - largest));
      mine.x = largest;
    }
    const float largest = warp_max(mine.x);
    const float weight = warp_sum(mine.y * ex2_approx(mine.x - largest));
    if (lane == 0) st_shared(&scales[head], make_float2(largest, 1.0f / weight));
  }
  __syncthreads();
  constexpr int kQuads = kHeadDim / 4;
  for (int i = thread; i < heads * kQuads; i += kWarps * 32) {
    const int head = i / kQuads, dim = i % kQuads * 4;
    const float2 scale = ld_shared(&scales[head]);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int s = 0; s < active; ++s) {
      const float4 x = ld_global(reinterpret_cast<const float4*>(from.out_of(s, first_head + head) + dim));
      const float weight = scale.y * ex2_approx(ld_global(from.all_of(s, first_head + head)).x - scale.x);
      sum.x = fmaf(x.x, weight, sum.x);
      sum.y = fmaf(x.y, weight, sum.y);
      sum.z = fmaf(x.z, weight, sum.z);
      sum.w = fmaf(x.w, weight, sum.w);
    }
    st_shared(reinterpret_cast<float4*>(out + head * kHeadDim + dim), sum);
  }
}

// From out [heads, kHeadDim] in shared memory, all threads behind a barrier, to att and its quantized blocks.
// `first`: the first element's place in row m.
template <KvFormat kValueFormat, int kHeadDim>
__device__ __forceinline__ void finish(const Attend& a, int m, int first, int heads, float* out) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if constexpr (kValueFormat == KvFormat::Int8) {
    constexpr kv::Rotation rotation = rotation_of(kHeadDim);
    for (int head = warp; head < heads; head += kWarps) {
      float* const of_head = out + head * kHeadDim;
      float x[(kHeadDim + 31) / 32];
      const auto for_my_elements = [&](auto f) {
#pragma unroll
        for (int j = 0; j < (kHeadDim + 31) / 32; ++j) {
          if (lane + 32 * j < kHeadDim) f(x[j], of_head + lane + 32 * j);
        }
      };
      for_my_elements([](float& value, const float* at) { value = ld_shared(at); });
      rotate_back<rotation.m>(rotation, x, of_head);
      __syncwarp();  // others may read of_head still
      for_my_elements([](float value, float* at) { st_shared(at, value); });
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

}  // namespace ringlm::cuda::attention

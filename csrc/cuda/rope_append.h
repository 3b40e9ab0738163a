// rope_append: norm of q and k, their turning, centring of keys, rotation, and the write into the ring.
//   q, k = RMSNorm(q, k);  q_pinned = R(pinned) q;  q, k = R(own) q, k;  k -= c_own;  offsets = q . c_e
//   q, q_pinned, k, v = H (s . q, ...) where the rows are INT8;  ring[slot(position)] = k, v
//
// Floor, bytes a row: 8 head_dim (n_head + 2 n_head_kv) for q, k, v in and out, 4 n_head head_dim more where
// rows are pinned, and the two rows of the ring; norms, angles and biases are shared and stay in L2.
// Mapping: a warp a head, of q, k or v in one grid: (q blocks, k blocks, v blocks; M). Lane l holds elements
// l + 32 j. The element that one turns with is read a second time, from L1, rather than exchanged: pairings
// and partial rotations are index arithmetic then. Where the norm is over all heads, a block has all of them,
// because none may be written before the sum is complete.
// Registers: at most 80, and 128 for heads above 128. Shared memory: 128 bytes of sums and, where the
// rotation has a part of order 12 or 20, head_dim floats a warp. Shapes: head_dim a multiple of 16 up to 256,
// rope_dims even.
#pragma once

#include "cuda/launch.h"
#include "cuda/port.h"
#include "cuda/reduce.h"
#include "cuda/rotation.h"

namespace ringlm::cuda {

constexpr int kRopeWarps = 4;  // of a block; kRopeMostWarps where the norm is over all heads
constexpr int kRopeMostWarps = 8;

// The most that a key or value may be. From 65520 on, rounding to f16 gives infinity: the element, or the
// scale.
__device__ __forceinline__ float largest_of(KvFormat format) {
  const float half_limit = bits_as<float>(0x477fefffu);  // the float below 65520
  return format == KvFormat::F16 ? half_limit : format == KvFormat::Int8 ? 127.0f * half_limit : FLT_MAX;
}

// What element i of a head turns with: x c + other * side * s, at angle pair `pair`.
struct Turn {
  int other, pair;
  float side;
  bool turns;
};

__device__ __forceinline__ Turn turn_of(int i, int rope_dims, RopePairing pairing) {
  if (i >= rope_dims) return {i, 0, 0.0f, false};
  if (pairing == RopePairing::Interleaved) return {i ^ 1, i / 2, (i & 1) != 0 ? 1.0f : -1.0f, true};
  const int pairs = rope_dims / 2;
  const bool first = i < pairs;
  return {first ? i + pairs : i - pairs, first ? i : i - pairs, first ? -1.0f : 1.0f, true};
}

__device__ __forceinline__ float turned(const Turn& t, const float* angles, float x, float other) {
  if (!t.turns || angles == nullptr) return x;
  const float2 angle = ld_global(reinterpret_cast<const float2*>(angles) + t.pair);
  return x * angle.x + other * (t.side * angle.y);
}

// The row of a plane of the ring: [n_head_kv, capacity] rows.
struct RingRow {
  std::uint8_t* data;
  std::uint8_t* scale;
};

__device__ __forceinline__ std::int64_t slot_of(const KvLayer* layer, std::int64_t position) {
  const std::int64_t pinned = ld_global(&layer->pinned), capacity = ld_global(&layer->capacity);
  return position < pinned ? position : pinned + (position - pinned) % (capacity - pinned);
}

// kv::store_int8, kv/row.h: the same bits.
template <int kValues>
__device__ __forceinline__ void store_int8(const RingRow& to, const float (&x)[kValues], int head_dim) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const float magnitude = fabsf(x[j]);
    largest = lane + 32 * j < head_dim && magnitude > largest ? magnitude : largest;
  }
  largest = warp_max(largest);
  std::uint16_t scale = __half_as_ushort(__float2half_rn(largest / 127.0f));
  // Subnormal: a step down would clip too much.
  if (scale < 0x0400 && 127.0f * __half2float(__ushort_as_half(scale)) < largest) ++scale;
  const float step = scale != 0 ? __half2float(__ushort_as_half(scale)) : 1.0f;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const int i = lane + 32 * j;
    if (i >= head_dim) continue;
    float code = rintf(x[j] / step);
    code = code > 127.0f ? 127.0f : code;
    code = code >= -127.0f ? code : -127.0f;  // NaN too: a number that fits the conversion
    st_global(to.data + i, static_cast<std::uint8_t>(static_cast<int>(code) + 128));
  }
  if (lane == 0) st_global(reinterpret_cast<std::uint16_t*>(to.scale), scale);
}

template <int kValues>
__device__ __forceinline__ void store_row(KvFormat format, const RingRow& to, const float (&x)[kValues],
                                          int head_dim) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (format == KvFormat::Int8) return store_int8(to, x, head_dim);
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const int i = lane + 32 * j;
    if (i >= head_dim) continue;
    if (format == KvFormat::F16) {
      st_global(reinterpret_cast<std::uint16_t*>(to.data) + i, __half_as_ushort(__float2half_rn(x[j])));
    } else {
      st_global(reinterpret_cast<float*>(to.data) + i, x[j]);
    }
  }
}

// A head in registers, with the elements that its own turn with.
template <int kValues>
struct Head {
  float x[kValues], other[kValues];
};

template <int kValues>
__device__ __forceinline__ void store_head(float* to, const float (&x)[kValues], int head_dim) {
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const int i = static_cast<int>(threadIdx.x) % 32 + 32 * j;
    if (i < head_dim) st_global(to + i, x[j]);
  }
}

// From memory, after its norm. weight: of this head, or null where there is none; row_scale: of the norm over
// all heads, or 0 where the norm is of the head.
template <int kValues>
__device__ __forceinline__ void load_head(const RopeAppend& a, const float* from, const float* weight,
                                          float row_scale, Head<kValues>& head) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const int i = lane + 32 * j;
    const bool inside = i < a.head_dim;
    head.x[j] = inside ? ld_global(from + i) : 0.0f;
    head.other[j] = inside ? ld_global(from + turn_of(i, a.rope_dims, a.pairing).other) : 0.0f;
    sum += head.x[j] * head.x[j];
  }
  __syncwarp();  // all of it is read before any of it is written
  if (weight == nullptr) return;
  const float scale =
      a.qk_norm == QkNorm::Full ? row_scale : inverse_rms(warp_sum(sum), a.head_dim, a.norm_eps);
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const int i = lane + 32 * j;
    if (i >= a.head_dim) continue;
    head.x[j] *= scale * ld_global(weight + i);
    head.other[j] *= scale * ld_global(weight + turn_of(i, a.rope_dims, a.pairing).other);
  }
}

// c_e of kv/cache.h: element i of KV head h, in epoch e of row m.
__device__ __forceinline__ bool centred(const RopeAppend& a) {
  return a.k_bias != nullptr && a.epochs != nullptr;
}
__device__ __forceinline__ float centre_of(const RopeAppend& a, int m, int e, int h, int i) {
  const Turn t = turn_of(i, a.rope_dims, a.pairing);
  const float* const bias = a.k_bias + h * a.head_dim;
  return turned(t, a.epochs + (std::int64_t{m} * kEpochs + e) * a.rope_dims, ld_global(bias + i),
                ld_global(bias + t.other));
}

template <int kValues, int kOrder>
__device__ __forceinline__ void append_query(const RopeAppend& a, const kv::Rotation& rotation, int m, int h,
                                             float row_scale, float* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t index = std::int64_t{m} * a.n_head + h;
  const KvLayer* const layer = ld_global(&a.rows[m].layers) + a.layer;
  const bool has_pinned = ld_global(&layer->pinned) > 0;
  const float* weight = a.q_norm;
  if (weight != nullptr && a.qk_norm == QkNorm::Full) weight += h * a.head_dim;
  Head<kValues> head;
  load_head(a, a.q + index * a.head_dim, weight, row_scale, head);

#pragma unroll 1
  for (int second = 0; second < (has_pinned ? 2 : 1); ++second) {
    const float* angles = second ? a.pinned : a.own;
    if (angles != nullptr) angles += std::int64_t{m} * a.rope_dims;
    float q[kValues];
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      q[j] = turned(turn_of(lane + 32 * j, a.rope_dims, a.pairing), angles, head.x[j], head.other[j]);
    }
    // Of the pinned rows with the second query, of both others with the first.
    for (int e = second ? kEpochs - 1 : 0; centred(a) && e < (second ? kEpochs : kEpochs - 1); ++e) {
      float product = 0.0f;
#pragma unroll
      for (int j = 0; j < kValues; ++j) {
        if (lane + 32 * j < a.head_dim)
          product += q[j] * centre_of(a, m, e, h * a.n_head_kv / a.n_head, lane + 32 * j);
      }
      product = warp_sum(product);
      if (lane == 0) st_global(a.offsets + index * kEpochs + e, product);
    }
    if (a.k_format == KvFormat::Int8) rotate<kOrder>(rotation, q, scratch);
    store_head((second ? a.q_pinned : a.q) + index * a.head_dim, q, a.head_dim);
  }
}

// A head of k, or of v, which neither has a norm nor turns.
template <int kValues, int kOrder>
__device__ __forceinline__ void append_key_or_value(const RopeAppend& a, const kv::Rotation& rotation, int m,
                                                    int h, bool is_key, float row_scale, float* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t index = std::int64_t{m} * a.n_head_kv + h;
  const KvLayer* const layer = ld_global(&a.rows[m].layers) + a.layer;
  const std::int64_t slot = slot_of(layer, ld_global(&a.rows[m].position));
  const std::int64_t at = h * ld_global(&layer->capacity) + slot;
  std::uint8_t* const data = ld_global(is_key ? &layer->k : &layer->v);
  std::uint8_t* const scales = ld_global(is_key ? &layer->k_scales : &layer->v_scales);
  const KvFormat format = is_key ? a.k_format : a.v_format;
  const int element = format == KvFormat::Int8 ? 1 : format == KvFormat::F16 ? 2 : 4;
  float* const memory = (is_key ? a.k : a.v) + index * a.head_dim;
  const float* weight = is_key ? a.k_norm : nullptr;
  if (weight != nullptr && a.qk_norm == QkNorm::Full) weight += h * a.head_dim;

  Head<kValues> head;
  load_head(a, memory, weight, row_scale, head);
  if (is_key) {
    const float* const own = a.own ? a.own + std::int64_t{m} * a.rope_dims : nullptr;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const int i = lane + 32 * j;
      if (i >= a.head_dim) continue;
      head.x[j] = turned(turn_of(i, a.rope_dims, a.pairing), own, head.x[j], head.other[j]);
      if (centred(a)) head.x[j] -= centre_of(a, m, 0, h, i);
    }
  }
  if (format == KvFormat::Int8) rotate<kOrder>(rotation, head.x, scratch);
  bool fits = true;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    if (lane + 32 * j < a.head_dim) fits = fits && fabsf(head.x[j]) <= largest_of(format);
  }
  const bool bad = warp_any(kFullWarp, !fits);
  if (bad && lane == 0) atomicMax(a.bad + m, 1u);
  store_head(memory, head.x, a.head_dim);
  store_row(format, {data + at * a.head_dim * element, scales + 2 * at}, head.x, a.head_dim);
}

// 1 / sqrt(mean(x^2) + eps) of all heads of a row, by the block.
__device__ __forceinline__ float scale_of_row(const float* x, int n, float eps, float* of_warp) {
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) {
    const float value = ld_global(x + i);
    sum += value * value;
  }
  return inverse_rms(block_sum(sum, of_warp), n, eps);
}

// A block has `heads_per_block` heads of one row and one of q, k, v.
template <int kValues, int kOrder>
__global__ void __launch_bounds__(32 * kRopeMostWarps, 2)
    rope_append_kernel(RopeAppend a, kv::Rotation rotation, int heads_per_block) {
  SMEM_DYN(float, scratch);  // [warps, head_dim] where the rotation wants it
  SMEM_STATIC(float, of_warp, kMostWarps);
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int m = static_cast<int>(blockIdx.y);
  const int q_blocks = (a.n_head + heads_per_block - 1) / heads_per_block;
  const int kv_blocks = (a.n_head_kv + heads_per_block - 1) / heads_per_block;
  int block = static_cast<int>(blockIdx.x), kind = 0;  // q, k, v
  if (block >= q_blocks) {
    block -= q_blocks;
    kind = 1 + block / kv_blocks;
    block %= kv_blocks;
  }
  const int heads = kind == 0 ? a.n_head : a.n_head_kv;
  float row_scale = 0.0f;
  if (a.qk_norm == QkNorm::Full && kind < 2) {
    const int n = heads * a.head_dim;
    row_scale = scale_of_row((kind == 0 ? a.q : a.k) + std::int64_t{m} * n, n, a.norm_eps, of_warp);
  }
  const int first = block * heads_per_block, end = min(first + heads_per_block, heads);
  float* const mine = scratch + (kOrder > 1 ? warp * a.head_dim : 0);
  for (int h = first + warp; h < end; h += warps) {
    if (kind == 0) {
      append_query<kValues, kOrder>(a, rotation, m, h, row_scale, mine);
    } else {
      append_key_or_value<kValues, kOrder>(a, rotation, m, h, kind == 1, row_scale, mine);
    }
  }
}

}  // namespace ringlm::cuda

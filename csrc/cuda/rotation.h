// kv/rotation.h by a warp: the signed Hadamard rotation of a head, forward and back.
//
// Lane l holds the elements l + 32 j, j < kValues, of a head of up to 32 kValues. Sylvester's part takes
// shuffles for the distances below 32 and registers above; Paley's part, for head sizes with a factor of 3 or
// 5 such as 80 and 96, takes its columns from shared memory, where the lanes of a row of it read neighbours
// and the others the same words. The order of sums is that of the CPU: results are bit-equal to kv::rotate.
#pragma once

#include "cuda/port.h"
#include "kv/rotation.h"

namespace ringlm::cuda {

// kv::make_rotation.
__host__ __device__ constexpr kv::Rotation rotation_of(int head_dim) {
  kv::Rotation best{head_dim, 1, 1};
  for (int m = 1; m <= 20; m = m == 1 ? 12 : m + 8) {  // 1, 12, 20
    if (head_dim % m != 0) continue;
    const int width = (head_dim / m) & -(head_dim / m);  // the largest power of two that divides it
    if (m * width > best.m * best.width) best = {head_dim, m, width};
  }
  return best;
}

// Paley's matrix of order n = q + 1 is a first row of ones, a first column of minus ones, and a core in which
// every row is the one above it turned by a place: entry (a, b) is 1 where a = b or a - b is a square modulo
// q. Bit c of this is set where the core has -1 at b - a = c; of the transposed one, at a - b = c.
__host__ __device__ constexpr std::uint32_t paley_core(int q, bool transposed) {
  std::uint32_t squares = 0, minus = 0;
  for (int i = 1; i < q; ++i) squares |= 1u << i * i % q;
  for (int c = 1; c < q; ++c) {
    const int difference = transposed ? c : q - c;
    if ((squares >> difference & 1u) == 0) minus |= 1u << c;
  }
  return minus;
}

// Row i of the matrix, or of its transpose: bit j is set where entry j is -1.
template <int kOrder>
__device__ __forceinline__ std::uint32_t paley_row(int i, bool transposed) {
  constexpr int q = kOrder - 1;
  constexpr std::uint32_t all = (1u << q) - 1;
  constexpr std::uint32_t forward = paley_core(q, false), back = paley_core(q, true);
  if (i == 0) return transposed ? all << 1 : 0;
  const std::uint32_t core = transposed ? back : forward;
  const std::uint32_t turned = (core << (i - 1) | core >> (q - (i - 1))) & all;
  return turned << 1 | (transposed ? 0u : 1u);
}

// The column of x [m][width] that element `at` lies in, times its row of the matrix.
template <int kOrder>
__device__ __forceinline__ float mixed(const float* x, int at, int width, bool transposed) {
  const int in_block = at % (kOrder * width), column = in_block % width;
  const std::uint32_t minus = paley_row<kOrder>(in_block / width, transposed);
  const float* const from = x + (at - in_block) + column;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kOrder; ++j) {
    const std::uint32_t sign = minus << (31 - j) & 0x80000000u;
    sum += bits_as<float>(bits_as<std::uint32_t>(ld_shared(from + j * width)) ^ sign);
  }
  return sum;
}

template <int kValues>
__device__ __forceinline__ void flip(float (&x)[kValues]) {
  const unsigned lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kValues; ++j) {
    const unsigned i = lane + 32u * static_cast<unsigned>(j);
    const auto overlaps = static_cast<std::uint32_t>(__popc(i & i >> 1));
    x[j] = bits_as<float>(bits_as<std::uint32_t>(x[j]) ^ overlaps << 31);
  }
}

template <int kOrder, int kValues>
__device__ __forceinline__ void hadamard(const kv::Rotation& r, float (&x)[kValues], float* scratch,
                                         bool transposed) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 1; half < 32; half *= 2) {
    if (half >= r.width) break;
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const float other = shfl_xor(kFullWarp, x[j], half);
      x[j] = (lane & half) != 0 ? other - x[j] : x[j] + other;
    }
  }
#pragma unroll
  for (int half = 1; half < kValues; half *= 2) {
    if (32 * half >= r.width) break;
#pragma unroll
    for (int j = 0; j + half < kValues; ++j) {
      if ((j & half) != 0) continue;
      const float a = x[j], b = x[j + half];
      x[j] = a + b;
      x[j + half] = a - b;
    }
  }
  if constexpr (kOrder > 1) {
    __syncwarp();  // scratch may be read still
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      if (lane + 32 * j < r.head_dim) st_shared(scratch + lane + 32 * j, x[j]);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      const int at = lane + 32 * j;
      if (at >= r.head_dim) continue;
      x[j] = mixed<kOrder>(scratch, at, r.width, transposed);
    }
  }
  const float scale = 1.0f / sqrtf(static_cast<float>(kOrder * r.width));
#pragma unroll
  for (int j = 0; j < kValues; ++j) x[j] *= scale;
}

// By a full warp. kOrder is r.m. scratch [head_dim]: shared memory of this warp; null will do for order 1.
template <int kOrder, int kValues>
__device__ __forceinline__ void rotate(const kv::Rotation& r, float (&x)[kValues], float* scratch) {
  flip(x);
  hadamard<kOrder>(r, x, scratch, false);
}

template <int kOrder, int kValues>
__device__ __forceinline__ void rotate_back(const kv::Rotation& r, float (&x)[kValues], float* scratch) {
  hadamard<kOrder>(r, x, scratch, true);
  flip(x);
}

}  // namespace ringlm::cuda

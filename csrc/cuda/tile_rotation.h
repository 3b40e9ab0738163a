// kv::rotate_back (kv/rotation.h) of rows that lie in accumulators of mma: o[n][2 r + b] of lane l is row
// l / 4 + 8 r, element 8 n + 2 (l % 4) + b. Bit 0 of an element's index is so within a lane, bits 1 and 2 are
// the lanes of a quad, and the others the index of a register: only two stages of the Walsh-Hadamard
// transform shuffle, and nothing goes through shared memory. By a full warp.
#pragma once

#include "cuda/port.h"

namespace ringlm::cuda {

// The sign of H[row][column], for kRows 12 and 20: Paley's first construction, as in kv/rotation.cpp. Indices
// are constants where it is called, in unrolled loops, and so is the result.
template <int kRows>
__host__ __device__ constexpr float paley_sign(int row, int column) {
  constexpr int q = kRows - 1;
  // Bit i: whether i is a square modulo q.
  constexpr std::uint32_t squares = kRows == 12 ? 0x0000023au : 0x00030af2u;
  const bool plus =
      row == column || row == 0 || (column != 0 && (squares >> ((row - column + q) % q) & 1) != 0);
  return plus ? 1.0f : -1.0f;
}

// H12 transposed on 12 elements.
__device__ __forceinline__ void mix_back_12(float (&x)[12]) {
  float y[12];
#pragma unroll
  for (int i = 0; i < 12; ++i) {
    y[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 12; ++j) y[i] += paley_sign<12>(j, i) * x[j];
  }
#pragma unroll
  for (int i = 0; i < 12; ++i) x[i] = y[i];
}

// H20 transposed: the kOdd elements of the result, from all of even index and all of odd index.
template <int kOdd>
__device__ __forceinline__ void mix_back_20(const float (&even)[10], const float (&odd)[10], float (&y)[10]) {
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    y[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 10; ++j) {
      y[i] += paley_sign<20>(2 * j, 2 * i + kOdd) * even[j];
      y[i] += paley_sign<20>(2 * j + 1, 2 * i + kOdd) * odd[j];
    }
  }
}

template <int kHeadDim>
__device__ __forceinline__ void rotate_back_rows(float (&o)[kHeadDim / 8][4], int lane) {
  static_assert(kHeadDim == 64 || kHeadDim == 80 || kHeadDim == 96 || kHeadDim == 128 || kHeadDim == 256);
  constexpr int kRegisters = kHeadDim / 8;
  constexpr int kMixed = kHeadDim == 80 ? 20 : kHeadDim == 96 ? 12 : 1;  // Rotation::m
  constexpr int kWidth = kHeadDim / kMixed;
  const int in_quad = lane % 4;
#pragma unroll
  for (int n = 0; n < kRegisters; ++n) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float a = o[n][i], b = o[n][i + 1];
      o[n][i] = a + b;
      o[n][i + 1] = a - b;
    }
  }
#pragma unroll
  for (int step = 1; step < 4 && 2 * step < kWidth; step *= 2) {
#pragma unroll
    for (int n = 0; n < kRegisters; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float other = shfl_xor(kFullWarp, o[n][i], step);
        o[n][i] = other + ((in_quad & step) != 0 ? -o[n][i] : o[n][i]);
      }
    }
  }
#pragma unroll
  for (int step = 1; 8 * step < kWidth; step *= 2) {
#pragma unroll
    for (int n = 0; n < kRegisters; ++n) {
      if ((n & step) != 0) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = o[n][i], b = o[n + step][i];
        o[n][i] = a + b;
        o[n + step][i] = a - b;
      }
    }
  }
  if constexpr (kMixed == 12) {  // [12][8]: a register is a row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[12];
#pragma unroll
      for (int n = 0; n < 12; ++n) x[n] = o[n][i];
      mix_back_12(x);
#pragma unroll
      for (int n = 0; n < 12; ++n) o[n][i] = x[n];
    }
  }
  if constexpr (kMixed == 20) {  // [20][4]: lanes 0 and 1 of a quad have the even rows, 2 and 3 the odd ones
    const bool odd = in_quad >= 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float mine[10], others[10], y[10];
#pragma unroll
      for (int n = 0; n < 10; ++n) {
        mine[n] = o[n][i];
        others[n] = shfl_xor(kFullWarp, mine[n], 2);
      }
      if (odd) {
        mix_back_20<1>(others, mine, y);
      } else {
        mix_back_20<0>(mine, others, y);
      }
#pragma unroll
      for (int n = 0; n < 10; ++n) o[n][i] = y[n];
    }
  }
  // kv::rotation_sign: the parity of overlapping pairs of ones in the element's binary digits. Those of n are
  // known here, those of 2 in_quad + b are of the lane, and one pair has its lower digit in the lane's part.
  const float scale = 1.0f / sqrtf(static_cast<float>(kHeadDim));       // the block is the whole head
  const float of_lane[2] = {scale, in_quad % 2 != 0 ? -scale : scale};  // of b = 0, 1, but for bits 1 and 2
  const float upper = in_quad == 3 ? -1.0f : 1.0f, between = in_quad >= 2 ? -upper : upper;
#pragma unroll
  for (int n = 0; n < kRegisters; ++n) {
    const float of_register = (__popc(static_cast<unsigned>(n & n >> 1)) & 1) != 0 ? -1.0f : 1.0f;
    const float sign = of_register * (n % 2 != 0 ? between : upper);
#pragma unroll
    for (int i = 0; i < 4; ++i) o[n][i] *= sign * of_lane[i % 2];
  }
}

}  // namespace ringlm::cuda

// The inverse of the rotation of INT8 rows (kv/rotation.h), of a head in shared memory by one warp.
#pragma once

#include "cuda/port.h"

namespace ringlm::cuda {

// H_m acts on the columns of a head as a matrix [m][width], Walsh-Hadamard on its rows.
template <int kHeadDim>
struct RotationOf {
  static constexpr int kM = kHeadDim % 12 == 0 ? 12 : kHeadDim % 20 == 0 ? 20 : 1;
  static constexpr int kWidth = kHeadDim / kM;
  static_assert((kWidth & (kWidth - 1)) == 0, "several blocks in a head");
};

// Whether the element of H_N in row i and column j is 1, and not -1: Paley's construction.
template <int kN>
__device__ __forceinline__ bool hadamard_plus(int i, int j) {
  constexpr int q = kN - 1;
  constexpr std::uint32_t squares = [] {  // bit d: d is a square modulo q
    std::uint32_t bits = 0;
    for (int d = 1; d < q; ++d) bits |= 1u << d * d % q;
    return bits;
  }();
  const int difference = i >= j ? i - j : i - j + q;
  return i == j || i == 0 || (j != 0 && (squares >> difference & 1) != 0);
}

// x [kHeadDim] becomes signs * H^T x * scale; the rotation's own 1 / sqrt(kHeadDim) is the caller's. All
// lanes see the result, after the last __syncwarp.
template <int kHeadDim>
__device__ __forceinline__ void rotate_back(float* x, float scale) {
  constexpr int kM = RotationOf<kHeadDim>::kM, kWidth = RotationOf<kHeadDim>::kWidth;
  constexpr int kEach = (kHeadDim + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 1; half < kWidth; half *= 2) {
#pragma unroll
    for (int pair = lane; pair < kHeadDim / 2; pair += 32) {
      float* const at = x + pair / half * 2 * half + pair % half;
      const float a = ld_shared(at), b = ld_shared(at + half);
      st_shared(at, a + b);
      st_shared(at + half, a - b);
    }
    __syncwarp();
  }
  float y[kEach];
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = lane + 32 * n;
    if (i >= kHeadDim) break;
    if constexpr (kM == 1) {
      y[n] = ld_shared(x + i);
    } else {
      y[n] = 0.0f;
      for (int j = 0; j < kM; ++j) {
        const float z = ld_shared(x + j * kWidth + i % kWidth);
        y[n] += hadamard_plus<kM>(j, i / kWidth) ? z : -z;
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kEach; ++n) {
    const int i = lane + 32 * n;
    if (i >= kHeadDim) break;
    const auto bits = static_cast<std::uint32_t>(i);
    st_shared(x + i, __popc(bits & bits >> 1) % 2 != 0 ? -scale * y[n] : scale * y[n]);
  }
  __syncwarp();
}

}  // namespace ringlm::cuda

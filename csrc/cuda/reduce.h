// Sums and maxima over a block of whole warps, in an order that depends on its size alone.
#pragma once

#include <cfloat>

#include "cuda/port.h"

namespace ringlm::cuda {

constexpr int kMostWarps = 32;

// Every thread gets the sum. of_warp [kMostWarps] is shared memory, free again behind the next barrier.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* of_warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  value = warp_sum(value);
  if (lane == 0) st_shared(&of_warp[warp], value);
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x) / 32 ? ld_shared(&of_warp[lane]) : T{};
  return warp_sum(value);
}

// The same of the maximum, of values that are not below T{}.
template <class T>
__device__ __forceinline__ T block_max(T value, T* of_warp) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  value = warp_max(value);
  if (lane == 0) st_shared(&of_warp[warp], value);
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x) / 32 ? ld_shared(&of_warp[lane]) : T{};
  return warp_max(value);
}

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= FLT_MAX; }

__device__ __forceinline__ float not_a_number() { return bits_as<float>(0x7fc00000u); }

// The magnitude of x as an unsigned number: in the order of magnitudes, NaN above infinity.
__device__ __forceinline__ std::uint32_t magnitude_bits(float x) {
  return bits_as<std::uint32_t>(x) & 0x7fffffffu;
}

// 1 / sqrt(mean(x^2) + eps) of n numbers (arXiv:1910.07467). Where the sum of squares is beyond float32 it
// would be zero, and so would the row: NaN says so.
__device__ __forceinline__ float inverse_rms(float sum_of_squares, int n, float eps) {
  if (!is_finite(sum_of_squares)) return not_a_number();
  return rsqrtf(sum_of_squares / static_cast<float>(n) + eps);
}

}  // namespace ringlm::cuda

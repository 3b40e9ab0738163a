// What is between products where they do not do it themselves: norms, the next product's input, and the
// activation of a prefill. Each reads its rows from memory once and from L2 or L1 the second time.
//
//   to_quantized  x w in blocks of 32 with the squares of x; the norm's scale is left to the product. Floor,
//                 bytes a row: 4 cols in, 2 cols + 20 cols / 32 out. A warp a block of 32 columns.
//   to_halves     RMSNorm(x) as halves with a step. Floor: 4 cols in, 2 cols out. A block a row, in two
//                 passes: sum of squares and the largest, then the halves.
//   add_normed    x += scale RMSNorm(y), and the next input. Floor: 12 cols, and that of to_quantized. A
//                 block a row: sum of squares of y, then a warp a block of 32 columns.
//   gate_up       floor: 12 n; a thread four elements.
//   check_finite  floor: 4 n; a block a row, 16 bytes a lane.
// Registers: at most 64. Shared memory: 256 bytes. Shapes: any number of columns.
#pragma once

#include "cuda/activation.h"
#include "cuda/launch.h"
#include "cuda/port.h"
#include "cuda/quantize.h"
#include "cuda/reduce.h"

namespace ringlm::cuda {

constexpr int kRowThreads = 1024;   // of a block that has a whole row
constexpr int kPieceThreads = 256;  // of other blocks
constexpr int kPieceWarps = kPieceThreads / 32;

__device__ __forceinline__ const float* input_row(const Normed& a, int m) {
  return a.x + std::int64_t{a.index != nullptr ? ld_global(a.index + m) : m} * a.cols;
}

__global__ void __launch_bounds__(kPieceThreads) to_quantized_kernel(Normed a, Quantized to) {
  const int m = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32;
  const int block = static_cast<int>(blockIdx.x) * kPieceWarps + static_cast<int>(threadIdx.x) / 32;
  if (block >= blocks_of(a.cols)) return;
  const int column = block * kBlock + lane;
  const float x = column < a.cols ? ld_global(input_row(a, m) + column) : 0.0f;
  const float weight = a.norm != nullptr && column < a.cols ? ld_global(a.norm + column) : 1.0f;
  quantize_block(to, m, block, x, weight);
}

// A power of two: `largest` over it is in [2^13, 2^14), below where largest is tiny. NaN for what is not
// finite.
__device__ __forceinline__ float step_below_2_14(float largest) {
  if (!is_finite(largest)) return not_a_number();
  const float power = bits_as<float>(bits_as<std::uint32_t>(largest) & 0x7f800000u);
  return fmaxf(power, 0x1p-100f) * 0x1p-13f;
}

__global__ void __launch_bounds__(kRowThreads) to_halves_kernel(Normed a, Halves to) {
  SMEM_STATIC(float, sums, kMostWarps);
  SMEM_STATIC(std::uint32_t, maxima, kMostWarps);
  const int m = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const float* const x = input_row(a, m);
  const auto weight = [&](int column) { return a.norm != nullptr ? ld_global(a.norm + column) : 1.0f; };
  float sum = 0.0f;
  std::uint32_t largest_seen = 0;
  for (int column = thread; column < a.cols; column += kRowThreads) {
    const float value = ld_global(x + column);
    sum += value * value;
    largest_seen = max(largest_seen, magnitude_bits(value * weight(column)));
  }
  const float largest = bits_as<float>(block_max(largest_seen, maxima));
  float scale = 1.0f;
  if (a.norm != nullptr) scale = inverse_rms(block_sum(sum, sums), a.cols, a.eps);
  const float step = step_below_2_14(largest * scale);
  const float factor = scale / step;
  const int stride = blocks_of(a.cols) * kBlock;
  half* const out = to.x + std::int64_t{m} * stride;
  for (int column = thread; column < stride; column += kRowThreads) {
    st_global(out + column,
              __float2half_rn(column < a.cols ? ld_global(x + column) * weight(column) * factor : 0.0f));
  }
  if (thread == 0) st_global(to.steps + m, step);
}

__global__ void __launch_bounds__(kRowThreads) add_normed_kernel(AddNormed a) {
  SMEM_STATIC(float, sums, kMostWarps);
  const int m = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  float* const x = a.x + std::int64_t{m} * a.cols;
  const float* const y = a.y + std::int64_t{m} * a.cols;
  float scale = a.scale;
  if (a.norm != nullptr) {
    float sum = 0.0f;
    for (int column = thread; column < a.cols; column += kRowThreads) {
      const float value = ld_global(y + column);
      sum += value * value;
    }
    scale *= inverse_rms(block_sum(sum, sums), a.cols, a.eps);
  }
  for (int block = thread / 32; block < blocks_of(a.cols); block += kRowThreads / 32) {
    const int column = block * kBlock + lane;
    const bool inside = column < a.cols;
    float sum = 0.0f, next_weight = 1.0f;
    if (inside) {
      const float weight = a.norm != nullptr ? ld_global(a.norm + column) : 1.0f;
      sum = ld_global(x + column) + scale * ld_global(y + column) * weight;
      st_global(x + column, sum);
      if (a.next_norm != nullptr) next_weight = ld_global(a.next_norm + column);
    }
    if (a.next.digits != nullptr) quantize_block(a.next, m, block, sum, next_weight);
  }
}

__global__ void __launch_bounds__(kPieceThreads)
    gate_up_kernel(float* gate, const float* up, std::int64_t n, Activation activation) {
  const std::int64_t at = 4 * (std::int64_t{blockIdx.x} * kPieceThreads + threadIdx.x);
  if (at + 4 <= n) {
    float4 g = ld_global(reinterpret_cast<const float4*>(gate + at));
    const float4 u = ld_global(reinterpret_cast<const float4*>(up + at));
    g = make_float4(activate(activation, g.x) * u.x, activate(activation, g.y) * u.y,
                    activate(activation, g.z) * u.z, activate(activation, g.w) * u.w);
    st_global(reinterpret_cast<float4*>(gate + at), g);
    return;
  }
  for (std::int64_t i = at; i < n; ++i) {
    st_global(gate + i, activate(activation, ld_global(gate + i)) * ld_global(up + i));
  }
}

__global__ void __launch_bounds__(kPieceThreads)
    check_finite_kernel(const float* x, int n, std::uint32_t* bad) {
  const int m = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const float* const row = x + std::int64_t{m} * n;
  int found = 0;
  if (n % 4 == 0) {
    for (int i = 4 * thread; i < n; i += 4 * kPieceThreads) {
      const float4 v = ld_global(reinterpret_cast<const float4*>(row + i));
      found |= is_finite(v.x) && is_finite(v.y) && is_finite(v.z) && is_finite(v.w) ? 0 : 1;
    }
  } else {
    for (int i = thread; i < n; i += kPieceThreads) found |= is_finite(ld_global(row + i)) ? 0 : 1;
  }
  found = __syncthreads_or(found);
  if (thread == 0 && found != 0) st_global(bad + m, 1u);
}

}  // namespace ringlm::cuda

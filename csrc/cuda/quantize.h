// The input of gemv from floats in registers: Quantized of launch.h, the same bits as the CPU's quantize.
#pragma once

#include "cuda/launch.h"
#include "cuda/port.h"
#include "cuda/reduce.h"

namespace ringlm::cuda {

constexpr float kActLargest = 127.0f * 256.0f + 127.0f;

// Block `block` of row m of x * weight by a full warp, and its squares before the weight: lane l has column
// 32 block + l, 0 behind the last one. A block with a NaN or an infinity gets NaN for scales, and so does
// every product with it.
__device__ __forceinline__ void quantize_block(const Quantized& to, std::int64_t m, int block, float x,
                                               float weight = 1.0f) {
  const int lane = static_cast<int>(threadIdx.x) % 32, half_of = lane / 16, n_blocks = blocks_of(to.cols);
  const float value = x * weight;
  const float largest = bits_as<float>(warp_max(magnitude_bits(value)));
  const bool finite = is_finite(largest);
  // Such a block is nothing beside any other, and not far below that the inverse would overflow.
  const bool none = !finite || largest < 1e-30f;
  const float inverse = none ? 0.0f : kActLargest / largest;
  const int code = none ? 0 : __float2int_rn(value * inverse);
  const int low = static_cast<std::int8_t>(code & 0xff), high = (code - low) >> 8;
  const auto digit_at = [&](int piece) {
    return to.digits + ((4 * m + piece) * n_blocks + block) * 16 + lane % 16;
  };
  st_global(digit_at(half_of), static_cast<std::int8_t>(high));
  st_global(digit_at(2 + half_of), static_cast<std::int8_t>(low));

  const int half_total = warp_sum<16>(code);
  const int other_total = shfl_xor(kFullWarp, half_total, 16);
  const float step = finite ? (none ? 0.0f : largest * (1.0f / kActLargest)) : not_a_number();
  const float4 scales =
      make_float4(step, step * static_cast<float>(half_total), step * static_cast<float>(other_total),
                  step * static_cast<float>(half_total + other_total));
  if (lane == 0) st_global(to.scales + m * n_blocks + block, scales);
  if (to.squares == nullptr) return;
  const float square = warp_sum(x * x);
  if (lane == 0) st_global(to.squares + m * n_blocks + block, square);
}

}  // namespace ringlm::cuda

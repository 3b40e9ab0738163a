// 32 columns of a row, as the input of gemv: see Quantized in launch.h. One warp, lane l has column l.
#pragma once

#include <cfloat>

#include "cuda/launch.h"
#include "cuda/port.h"

namespace ringlm::cuda {

// Rounds as the CPU does: to nearest, ties to even. A block that is nothing beside any other is zero, and one
// with a number that is not finite makes every product with it NaN.
template <class = void>
__device__ __forceinline__ void quantize_block(const Quantized& to, int m, int block, float value) {
  constexpr float kLargest = 32639.0f;
  const int lane = static_cast<int>(threadIdx.x) % 32, half_block = lane / 16;
  const float largest = __uint_as_float(warp_max(__float_as_uint(fabsf(value))));  // of NaN too
  const bool finite = largest <= FLT_MAX, none = !(finite && largest >= 1e-30f);
  const float step = finite ? (none ? 0.0f : largest * (1.0f / kLargest)) : largest - largest;
  const int code = none ? 0 : __float2int_rn(value * (kLargest / largest));
  const int low = static_cast<std::int8_t>(code & 255), high = (code - low) / 256;
  const int sum = warp_sum<16>(code);
  const int other = shfl_xor(kFullWarp, sum, 16);

  const int blocks = (to.cols + kBlock - 1) / kBlock;
  const auto piece = [&](int i) {
    return to.digits + ((std::int64_t{m} * 4 + i) * blocks + block) * 16 + lane % 16;
  };
  st_global(piece(half_block), static_cast<std::int8_t>(high));
  st_global(piece(2 + half_block), static_cast<std::int8_t>(low));
  if (lane == 0) {
    st_global(to.scales + std::int64_t{m} * blocks + block,
              make_float4(step, step * static_cast<float>(sum), step * static_cast<float>(other),
                          step * static_cast<float>(sum + other)));
  }
}

}  // namespace ringlm::cuda

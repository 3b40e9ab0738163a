// How a kernel writes its result as the input of a product: a warp for 32 columns, a lane for each. Codes and
// scales are those of the CPU backend (cpu/matmul_body.h), bit for bit. No shared memory, few registers.
#pragma once

#include "cuda/launch.h"
#include "cuda/port.h"

namespace ringlm::cuda {

constexpr float kLargestCode = 127.0f * 256.0f + 127.0f;

// Of row m, columns 32 block to 32 block + 31. x: that of the lane's column, zero behind the last one;
// weight: the norm's, with which the product's input is multiplied. All lanes of the warp take part.
__device__ __forceinline__ void quantize_block(const Quantized& to, std::int64_t m, int block, float x,
                                               float weight = 1.0f) {
  const int lane = static_cast<int>(threadIdx.x) % 32, blocks = blocks_of(to.cols);
  const std::int64_t at = m * blocks + block;
  const float value = x * weight;
  const int largest_bits = warp_max(__float_as_int(value) & 0x7fffffff);  // as integers NaNs are the largest
  const float largest = __int_as_float(largest_bits);
  const bool finite = largest_bits < 0x7f800000;
  // Such a block is nothing beside any other, and not far below that the inverse would overflow.
  const bool none = !finite || largest < 1e-30f;
  const float step = !finite ? __int_as_float(0x7fc00000) : none ? 0.0f : largest * (1.0f / kLargestCode);
  const int code = none ? 0 : __float2int_rn(value * (kLargestCode / largest));

  const auto low = static_cast<std::int8_t>(code);
  const auto high = static_cast<std::int8_t>((code - low) >> 8);
  std::int8_t* const digits = to.digits + ((m * 4 + lane / 16) * blocks + block) * 16 + lane % 16;
  st_global(digits, high);
  st_global(digits + std::int64_t{2} * blocks * 16, low);

  const int sum = warp_sum<16>(code);
  const int other = shfl_xor(kFullWarp, sum, 16);
  if (lane == 0) {
    st_global(to.scales + at,
              make_float4(step, step * static_cast<float>(sum), step * static_cast<float>(other),
                          step * static_cast<float>(sum + other)));
  }
  if (to.squares) {
    const float square = warp_sum(__fmul_rn(x, x));  // not fused into the sum, so the same in every kernel
    if (lane == 0) st_global(to.squares + at, square);
  }
}

}  // namespace ringlm::cuda

// Instructions of one lane.
#include <cmath>
#include <limits>

#include "simt/device.h"

namespace simt {

// .ftz: a subnormal result becomes zero. A subnormal input would too, but gives 1 anyway.
float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}

int dp4a(int a, int b, int c) {
  std::uint32_t sum = static_cast<std::uint32_t>(c);  // wraps around, as the instruction does
  for (int i = 0; i < 4; ++i) {
    const auto x = static_cast<std::int8_t>(a >> 8 * i), y = static_cast<std::int8_t>(b >> 8 * i);
    sum += static_cast<std::uint32_t>(x * y);
  }
  return static_cast<int>(sum);
}

}  // namespace simt

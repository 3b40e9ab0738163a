#include "cuda/gemv.h"

namespace ringlm::cuda {

void gemv(const Gemv& a, Stream stream) {
  int tiles = 0;
  for (int p = 0; p < (a.end == End::Store ? a.n : 1); ++p) tiles += blocks_of(a.w[p].rows);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.experts ? a.M * a.slots : 1));
  const bool one = a.experts || a.M == 1;
  with_packed_type(a.w[0].type, [&](auto type) {
    constexpr gguf::DType kType = decltype(type)::value;
    if (one) {
      LAUNCH((gemv_rows<kType, 1>), grid, dim3(32 * kGemvWarps), 0, stream, a);
    } else {
      LAUNCH((gemv_rows<kType, kMostRows>), grid, dim3(32 * kGemvWarps), 0, stream, a);
    }
  });
  check_launch("gemv");
}

}  // namespace ringlm::cuda

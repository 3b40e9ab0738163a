#include "cuda/gemv.h"


namespace ringlm::cuda {
namespace {

template <gguf::DType kType, int kM>
void launch(const Gemv& a, dim3 grid, Stream stream) {
  LAUNCH((gemv_rows<kType, kM>), grid, dim3(32 * kGemvWarps), 0, stream, a);
}

}  // namespace

void gemv(const Gemv& a, Stream stream) {
  int tiles = 0;
  for (int p = 0; p < (a.end == End::Store ? a.n : 1); ++p) tiles += blocks_of(a.w[p].rows);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(a.experts ? a.M * a.slots : 1));
  const int M = a.experts ? 1 : a.M;
  with_packed_type(a.w[0].type, [&](auto type) {
    constexpr gguf::DType kType = decltype(type)::value;
    if (M == 1) return launch<kType, 1>(a, grid, stream);
    if (M == 2) return launch<kType, 2>(a, grid, stream);
    if (M <= 4) return launch<kType, 4>(a, grid, stream);
    launch<kType, 8>(a, grid, stream);
  });
  check_launch("gemv");
}

}  // namespace ringlm::cuda

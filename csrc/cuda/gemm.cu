#include "cuda/gemm.h"

namespace ringlm::cuda {

void gemm(const Gemm& a, Stream stream) {
  const auto tiles = [](int n) { return static_cast<unsigned>((n + kGemmTile - 1) / kGemmTile); };
  const dim3 grid(tiles(a.M), tiles(a.w.rows));
  with_packed_type(a.w.type, [&](auto type) {
    LAUNCH(gemm_tile<decltype(type)::value>, grid, dim3(kGemmThreads), kGemmSharedBytes, stream, a);
  });
  check_launch("gemm");
}

}  // namespace ringlm::cuda

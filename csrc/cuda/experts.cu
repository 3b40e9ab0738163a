#include "cuda/experts.h"

namespace ringlm::cuda {

void route(const Route& a, Stream stream) {
  LAUNCH(route_kernel, static_cast<unsigned>(a.M), 32, 0, stream, a);
  check_launch("route");
}

void mix_experts(const float* from, const float* shared, const float* weights, int M, int n_used, int cols,
                 float* y, Stream stream) {
  const auto grid = [M](int columns) {
    return dim3(static_cast<unsigned>((columns + kMixThreads - 1) / kMixThreads), static_cast<unsigned>(M));
  };
  if (cols % 4 == 0) {
    LAUNCH(mix_experts_kernel<float4>, grid(cols / 4), kMixThreads, 0, stream,
           reinterpret_cast<const float4*>(from), reinterpret_cast<const float4*>(shared), weights, n_used,
           cols / 4, reinterpret_cast<float4*>(y));
  } else {
    LAUNCH(mix_experts_kernel<float>, grid(cols), kMixThreads, 0, stream, from, shared, weights, n_used, cols,
           y);
  }
  check_launch("mix_experts");
}

}  // namespace ringlm::cuda

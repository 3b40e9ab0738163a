// The kernels of the tests, compiled by nvcc: port.h's other side. Never run.
#include "simt/faulty_kernels.h"
#include "simt/kernels.h"

void launch_all(cudaStream_t stream, const int* x, int* y, const float* f, float* g, const half* h,
                const std::uint32_t* u, std::uint32_t* v) {
  LAUNCH(kernels::block_sum, 3, 96, 0, stream, f, 1000, g);
  LAUNCH(kernels::column_sums, 1, 64, 2048, stream, f, 9, g);
  LAUNCH(kernels::tile_product<8>, 1, 32, 0, stream, h, h, g, 64);
  LAUNCH(kernels::tile_product<16>, 1, 32, 0, stream, h, h, g, 64);
  LAUNCH(kernels::sum_by_last_block<kernels::Fences::kBoth>, dim3(40), dim3(64), 0, stream, f, 100, g, v, g);
  LAUNCH(kernels::spread_and_sum<kernels::Who::kWarp>, 3, 32, 0, stream, f, g, v, g);
  LAUNCH((kernels::scratch_places<8, 16>), 1, 32, 0, stream, y);
  LAUNCH(kernels::gather<std::int8_t>, 1, 32, 0, stream, reinterpret_cast<const std::int8_t*>(x), 0, 1,
         reinterpret_cast<std::int8_t*>(y));
  LAUNCH(kernels::gather<half>, 1, 32, 0, stream, h, 0, 1, reinterpret_cast<half*>(y));
  LAUNCH(kernels::gather<float>, 1, 32, 0, stream, f, 0, 1, g);
  LAUNCH(kernels::gather<float4>, 1, 32, 0, stream, reinterpret_cast<const float4*>(f), 0, 1,
         reinterpret_cast<float4*>(g));
  LAUNCH(kernels::shared_stride<float2>, 1, 32, 0, stream, 1, reinterpret_cast<float2*>(g));
  LAUNCH(kernels::order_of_threads, 3, 64, 0, stream, v, y);
  LAUNCH(kernels::run_steps<true>, 1, 80, 0, stream, nullptr, nullptr, 6, nullptr);
  LAUNCH(kernels::ex2_of, 1, 32, 0, stream, f, g);
  LAUNCH(kernels::dp4a_of, 1, 32, 0, stream, x, x, x, y);
  LAUNCH(kernels::mma_registers<8>, 1, 32, 0, stream, u, u, g);
  LAUNCH(kernels::mma_registers<16>, 1, 32, 0, stream, u, u, g);
  LAUNCH(kernels::movmatrix_of, 1, 32, 0, stream, u, v);
  LAUNCH(kernels::ldmatrix_of<24>, 1, 32, 0, stream, h, v);
  LAUNCH(kernels::shuffles_of, 1, 32, 0, stream, x, 1, 32, y);
  LAUNCH(kernels::votes_of, 1, 32, 0, stream, x, y);
  LAUNCH(kernels::barrier_votes, 1, dim3(10, 5), 0, stream, y);
  LAUNCH(kernels::atomics_of, 1, 64, 0, stream, y, v);
  LAUNCH(faulty::early_read<false>, 1, 64, 0, stream, x, y);
  LAUNCH(faulty::copy_without_barrier<false>, 1, 64, 0, stream, x, y);
  LAUNCH(faulty::divergent_shuffle<false>, 1, 64, 0, stream, y);
  LAUNCH(faulty::misaligned_vector<false>, 1, 64, 0, stream, x, y);
  LAUNCH(faulty::shared_overrun<false>, 1, 64, 0, stream, y);
}

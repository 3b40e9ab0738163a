#include "cuda/norm.h"

namespace ringlm::cuda {
namespace {

dim3 grid_of(std::int64_t x, int y = 1) { return {static_cast<unsigned>(x), static_cast<unsigned>(y)}; }

}  // namespace

void to_quantized(const Normed& a, const Quantized& to, Stream stream) {
  const int blocks = (blocks_of(a.cols) + kPieceWarps - 1) / kPieceWarps;
  LAUNCH(to_quantized_kernel, grid_of(blocks, a.M), kPieceThreads, 0, stream, a, to);
  check_launch("to_quantized");
}

void to_halves(const Normed& a, const Halves& to, Stream stream) {
  LAUNCH(to_halves_kernel, grid_of(a.M), kRowThreads, 0, stream, a, to);
  check_launch("to_halves");
}

void add_normed(const AddNormed& a, Stream stream) {
  LAUNCH(add_normed_kernel, grid_of(a.M), kRowThreads, 0, stream, a);
  check_launch("add_normed");
}

void gate_up(float* gate, const float* up, int M, int n, Activation activation, Stream stream) {
  const std::int64_t all = std::int64_t{M} * n;
  const std::int64_t blocks = (all + 4 * kPieceThreads - 1) / (4 * kPieceThreads);
  LAUNCH(gate_up_kernel, grid_of(blocks), kPieceThreads, 0, stream, gate, up, all, activation);
  check_launch("gate_up");
}

void check_finite(const float* x, int M, int n, std::uint32_t* bad, Stream stream) {
  LAUNCH(check_finite_kernel, grid_of(M), kPieceThreads, 0, stream, x, n, bad);
  check_launch("check_finite");
}

}  // namespace ringlm::cuda

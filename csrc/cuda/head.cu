#include "cuda/head.h"

#include <algorithm>

namespace ringlm::cuda {
namespace {

// Pieces of a row, and how they are cut among blocks. A row may begin up to 3 floats into 16 bytes.
int pieces_of(const TopK& a) { return (a.n_vocab + 3 + kTopPiece - 1) / kTopPiece; }
int pieces_of_block(const TopK& a) { return (pieces_of(a) + kTopBlocks - 1) / kTopBlocks; }
int blocks_of_row(const TopK& a) { return (pieces_of(a) + pieces_of_block(a) - 1) / pieces_of_block(a); }

}  // namespace

std::size_t top_k_scratch_bytes(const TopK& a) {
  return static_cast<std::size_t>(a.M) * static_cast<std::size_t>(blocks_of_row(a)) *
         static_cast<std::size_t>(a.k) * sizeof(Key);
}

void top_k(const TopK& a, Stream stream) {
  const dim3 grid(static_cast<unsigned>(blocks_of_row(a)), static_cast<unsigned>(a.M));
  LAUNCH(top_k_kernel, grid, kTopThreads, 0, stream, a, pieces_of_block(a));
  check_launch("top_k");
}

}  // namespace ringlm::cuda

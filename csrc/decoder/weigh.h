// From the logits of a block to their weights: the one pass of the sampler that arithmetic bounds.
#pragma once

#include <cstddef>

namespace ringlm::detail {

constexpr std::size_t kBlock = 256;

// weights = 2^((x - max) * scale) where x >= lowest, else 0; both [kBlock]. Returns their sum: sums of
// sixteen terms are floats, the rest is double. (lowest - max) * scale must be at least -126. Every
// instruction set gives the same bits.
double weigh_block(const float* x, float max, float scale, float lowest, float* weights);

}  // namespace ringlm::detail

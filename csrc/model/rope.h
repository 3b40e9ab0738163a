// Rotary position embedding (RoFormer, arXiv:2104.09864): pair i of a head turns by position * frequency[i].
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ringlm/config.h"

namespace ringlm {

// Radians per position of each pair: base^(-2i/n) / factor, divided by the file's own factors where it
// has them. [rope_dims / 2], double: at position 10^6 a float32 angle would already be off by 0.03.
std::vector<double> rope_frequencies(const Config& config, std::span<const float> freq_factors);

// The rotation of one position: out[2i] = cos, out[2i + 1] = sin. out [2 * frequencies].
void rope_table(std::span<const double> frequencies, std::int64_t position, std::span<float> out);

// The rotation to the middle of epoch `index` of `length` positions, for the pairs that turn by less than one
// radian over an epoch; (0, 0) for the others. See kv/cache.h.
void epoch_table(std::span<const double> frequencies, std::int64_t index, std::int64_t length,
                 std::span<float> out);

// Turns one head in place. head [head_dim], table as above; elements from 2 * pairs on stay.
void rope_apply(std::span<float> head, std::span<const float> table, RopePairing pairing);

}  // namespace ringlm

// Rotary position embedding (RoFormer, arXiv:2104.09864): pair i of a head turns by position * frequency[i].
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ringlm/config.h"

namespace ringlm {

// How fast each pair turns.
struct RopeAngles {
  // Radians per position, [rope_dims / 2], double: at position 10^6 a float32 angle would be off by 0.03.
  std::vector<double> frequencies;
  double magnitude = 1.0;  // cos and sin are multiplied by it, and so are queries and keys
};

// `length`: the tokens in use, for the scalings that depend on them.
RopeAngles rope_angles(const Rope& rope, std::int32_t rope_dims, std::int64_t length);

// The angles of a model's layers. Most have one set of them. LongRoPE and dynamic NTK choose by the length of
// the text: what was turned in one regime must not meet what was turned in another.
class Ropes {
 public:
  explicit Ropes(const Config& config);

  // Of a text of so many tokens. 0 for all lengths where angles do not depend on it. Dynamic NTK, which is
  // defined for every length, has a regime for each doubling of the original one, with the angles of the
  // longest text in it.
  std::int32_t regime(std::int64_t length) const;

  // rope: an index of Config::ropes.
  const RopeAngles& at(std::int32_t rope, std::int32_t regime) const {
    const std::vector<RopeAngles>& regimes = angles_[static_cast<std::size_t>(rope)];
    return regimes[regimes.size() == 1 ? 0 : static_cast<std::size_t>(regime)];
  }

 private:
  std::vector<std::int64_t> ends_;               // the longest text of each regime but the last
  std::vector<std::vector<RopeAngles>> angles_;  // of each rope: one, or one for each regime
};

// The rotation of one position: out[2i] = cos, out[2i + 1] = sin, times the magnitude. out [rope_dims].
void rope_table(const RopeAngles& angles, std::int64_t position, std::span<float> out);

// The rotation to the middle of epoch `index` of `length` positions, for the pairs that turn by less than one
// radian over an epoch; (0, 0) for the others. See kv/cache.h.
void epoch_table(const RopeAngles& angles, std::int64_t index, std::int64_t length, std::span<float> out);

// Turns one head in place. head [head_dim], table as above; elements from 2 * pairs on stay.
void rope_apply(std::span<float> head, std::span<const float> table, RopePairing pairing);

}  // namespace ringlm

#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ringlm {
namespace {

// YaRN: pairs that turn more than beta_fast times over the original length keep their frequency, those that
// turn less than beta_slow times are divided by the factor. The bounds are whole pairs. Returns the share of
// the division in pair i, 0 to 1. (arXiv:2309.00071, section 3.2; the released code rounds the bounds.)
double yarn_ramp(const Rope& rope, double dims, double i) {
  const auto pair_that_turns = [&](double turns) {
    return dims * std::log(rope.original / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(rope.base));
  };
  const double low = std::max(std::floor(pair_that_turns(rope.beta_fast)), 0.0);
  const double high = std::min(std::ceil(pair_that_turns(rope.beta_slow)), dims - 1.0);
  return std::clamp((i - low) / std::max(high - low, 1e-3), 0.0, 1.0);
}

// Llama 3.1: by the turns over the original length, with a ramp that is linear in them.
double llama3_ramp(const Rope& rope, double frequency) {
  const double turns = rope.original * frequency / (2.0 * std::numbers::pi);
  const double kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  return 1.0 - std::clamp(kept, 0.0, 1.0);
}

double magnitude(const Rope& rope) {
  if (rope.attn_factor > 0.0) return rope.attn_factor;
  if (rope.scaling == RopeScaling::Yarn) return 0.1 * std::log(rope.factor) + 1.0;
  if (rope.scaling == RopeScaling::LongRope && rope.factor > 1.0) {
    return std::sqrt(1.0 + std::log(rope.factor) / std::log(rope.original));
  }
  return 1.0;
}

}  // namespace

RopeAngles rope_angles(const Rope& rope, std::int32_t rope_dims, std::int64_t length) {
  const double dims = rope_dims;
  const auto n = static_cast<double>(length);
  const bool is_long = rope.scaling == RopeScaling::LongRope && n > rope.original;
  const std::vector<float>& factors = is_long ? rope.long_factors : rope.factors;
  double base = rope.base;
  if (rope.scaling == RopeScaling::Ntk) base *= std::pow(rope.factor, dims / (dims - 2.0));
  if (rope.scaling == RopeScaling::DynamicNtk && n > rope.original) {
    base *= std::pow(rope.factor * n / rope.original - (rope.factor - 1.0), dims / (dims - 2.0));
  }
  RopeAngles angles;
  angles.magnitude = magnitude(rope);
  for (std::int32_t i = 0; i < rope_dims / 2; ++i) {
    double frequency = std::pow(base, -2.0 * i / dims);
    if (!factors.empty()) frequency /= static_cast<double>(factors[static_cast<std::size_t>(i)]);
    double divided = 0.0;  // the share of the frequency that is divided by the factor
    if (rope.scaling == RopeScaling::Linear) divided = 1.0;
    if (rope.scaling == RopeScaling::Yarn) divided = yarn_ramp(rope, dims, i);
    if (rope.scaling == RopeScaling::Llama3) divided = llama3_ramp(rope, frequency);
    angles.frequencies.push_back(frequency * (1.0 - divided + divided / rope.factor));
  }
  return angles;
}

Ropes::Ropes(const Config& config) {
  const Rope& first = config.ropes.front();
  const auto original = static_cast<std::int64_t>(first.original);
  if (first.scaling == RopeScaling::LongRope) ends_ = {original};
  if (first.scaling == RopeScaling::DynamicNtk) {
    for (std::int64_t end = original; end < config.n_ctx_limit; end *= 2) ends_.push_back(end);
  }
  for (const Rope& rope : config.ropes) {
    std::vector<RopeAngles>& regimes = angles_.emplace_back();
    regimes.push_back(rope_angles(rope, config.rope_dims, 0));
    if (&rope != &first) continue;
    for (const std::int64_t end : ends_) {
      const std::int64_t length = first.scaling == RopeScaling::DynamicNtk ? 2 * end : end + 1;
      regimes.push_back(rope_angles(rope, config.rope_dims, length));
    }
  }
}

std::int32_t Ropes::regime(std::int64_t length) const {
  return static_cast<std::int32_t>(std::ranges::lower_bound(ends_, length) - ends_.begin());
}

void rope_table(const RopeAngles& angles, std::int64_t position, std::span<float> out) {
  for (std::size_t i = 0; i < angles.frequencies.size(); ++i) {
    const double angle = static_cast<double>(position) * angles.frequencies[i];
    out[2 * i] = static_cast<float>(angles.magnitude * std::cos(angle));
    out[2 * i + 1] = static_cast<float>(angles.magnitude * std::sin(angle));
  }
}

void epoch_table(const RopeAngles& angles, std::int64_t index, std::int64_t length, std::span<float> out) {
  rope_table(angles, index * length + length / 2, out);
  for (std::size_t i = 0; i < angles.frequencies.size(); ++i) {
    if (angles.frequencies[i] * static_cast<double>(length) >= 1.0) out[2 * i] = out[2 * i + 1] = 0.0f;
  }
}

void rope_apply(std::span<float> head, std::span<const float> table, RopePairing pairing) {
  const std::size_t pairs = table.size() / 2;
  const bool interleaved = pairing == RopePairing::Interleaved;
  for (std::size_t i = 0; i < pairs; ++i) {
    float& a = head[interleaved ? 2 * i : i];
    float& b = head[interleaved ? 2 * i + 1 : i + pairs];
    const float c = table[2 * i], s = table[2 * i + 1];
    const float turned = a * c - b * s;
    b = a * s + b * c;
    a = turned;
  }
}

}  // namespace ringlm

#include "model/rope.h"

#include <cmath>

namespace ringlm {

std::vector<double> rope_frequencies(const Config& config, std::span<const float> freq_factors) {
  const std::size_t pairs = static_cast<std::size_t>(config.rope_dims) / 2;
  std::vector<double> frequencies(pairs);
  for (std::size_t i = 0; i < pairs; ++i) {
    const double exponent = -2.0 * static_cast<double>(i) / config.rope_dims;
    frequencies[i] = std::pow(config.rope_base, exponent) / config.rope_factor;
    if (!freq_factors.empty()) frequencies[i] /= static_cast<double>(freq_factors[i]);
  }
  return frequencies;
}

void rope_table(std::span<const double> frequencies, std::int64_t position, std::span<float> out) {
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    out[2 * i] = static_cast<float>(std::cos(angle));
    out[2 * i + 1] = static_cast<float>(std::sin(angle));
  }
}

void epoch_table(std::span<const double> frequencies, std::int64_t index, std::int64_t length,
                 std::span<float> out) {
  rope_table(frequencies, index * length + length / 2, out);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    if (frequencies[i] * static_cast<double>(length) >= 1.0) out[2 * i] = out[2 * i + 1] = 0.0f;
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

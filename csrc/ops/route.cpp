// Which experts a token goes to (arXiv:1701.06538, as Mixtral and Qwen do it): small, and the same for all
// backends.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/ops.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

void choose_experts(const Config& c, const Step& s, std::size_t m, std::span<const float> scores,
                    float shared) {
  const std::size_t used = size(c.n_expert_used);
  const std::span<std::int32_t> experts = s.a.routing.experts.subspan(m * used, used);
  const std::span<float> weights = s.a.routing.weights.subspan(m * size(c.n_slots()), size(c.n_slots()));

  // Softmax over all experts. With a score that is no number there is no choice: the weights become NaN,
  // which the step notices, and the experts are any, but no two of them the same.
  const float largest = *std::ranges::max_element(scores);
  double total = 0.0;
  for (const float score : scores) total += std::exp(static_cast<double>(score - largest));
  if (!std::isfinite(total)) {
    std::iota(experts.begin(), experts.end(), 0);
    std::ranges::fill(weights, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  double chosen = 0.0;
  for (std::size_t i = 0; i < used; ++i) {
    // The largest of those that come behind the one before.
    const auto behind = [&](std::int32_t e) {
      if (i == 0) return true;
      const float before = scores[size(experts[i - 1])];
      return scores[size(e)] < before || (scores[size(e)] == before && e > experts[i - 1]);
    };
    std::int32_t best = -1;
    for (std::int32_t e = 0; e < c.n_expert; ++e) {
      if (behind(e) && (best < 0 || scores[size(e)] > scores[size(best)])) best = e;
    }
    experts[i] = best;
    const double p = std::exp(static_cast<double>(scores[size(best)] - largest)) / total;
    weights[i] = static_cast<float>(p);
    chosen += p;
  }
  if (c.expert_weights_norm) {
    for (float& w : weights.first(used)) w = static_cast<float>(w / chosen);
  }
  if (c.n_ff_shared > 0) {
    weights[used] =
        std::isfinite(shared) ? 1.0f / (1.0f + std::exp(-shared)) : std::numeric_limits<float>::quiet_NaN();
  }
}

void assign_slots(const Config& c, const Step& s) {
  const std::size_t M = s.rows.size(), used = size(c.n_expert_used), n_slots = size(c.n_slots());
  const Routing& r = s.a.routing;
  const std::span<const std::int32_t> experts = r.experts.first(M * used);
  std::ranges::fill(r.first, 0);
  for (const std::int32_t e : experts) ++r.first[size(e) + 1];
  for (std::size_t e = 0; e < size(c.n_expert); ++e) r.first[e + 1] += r.first[e];
  // In ascending row; first[e] moves to the end of its expert and is moved back.
  for (std::size_t i = 0; i < experts.size(); ++i) {
    r.slots[i / used * n_slots + i % used] = r.first[size(experts[i])]++;
  }
  for (std::size_t e = size(c.n_expert); e > 0; --e) r.first[e] = r.first[e - 1];
  r.first[0] = 0;
  if (c.n_ff_shared == 0) return;
  for (std::size_t m = 0; m < M; ++m) {
    r.slots[m * n_slots + used] = static_cast<std::int32_t>(experts.size() + m);
  }
}

}  // namespace ringlm

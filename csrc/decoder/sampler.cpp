// One row of logits becomes one token.
//
// Top-k, top-p and min-p each keep a prefix of the tokens ordered by (logit descending, id ascending). So
// truncation never sorts or copies: it finds where the prefix ends (Cut). Logits are handled in blocks whose
// largest value is known. Blocks wholly below the cut are skipped, and the draw needs no pass over the
// logits: it proposes a block by the bound that its largest logit gives, then accepts or rejects one of its
// tokens.
#include "ringlm/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>

#include "decoder/logit_row.h"
#include "decoder/sampler_math.h"
#include "decoder/truncation.h"
#include "ops/device.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

using namespace detail;

constexpr std::int32_t kMaxWindow = 1 << 20;
constexpr std::size_t kFew = kTopLogits;  // logits that are drawn from without the others

std::size_t index_of(float value, const float* x, std::size_t n) {
  return static_cast<std::size_t>(std::find(x, x + n, value) - x);
}

// Fills out [n_blocks] and returns the largest.
float block_maxima(const Row& row, std::span<float> out) {
  float largest = -kInf;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    out[b] = max_of_block(row.block(b));
    largest = std::max(largest, out[b]);
  }
  return largest;
}

// Position of the first value that is NaN or infinite, or the size.
std::size_t first_not_finite(std::span<const float> x) {
  const U4 exponent = {0x7f800000, 0x7f800000, 0x7f800000, 0x7f800000};
  std::size_t i = 0;
  for (; i + kBlock <= x.size(); i += kBlock) {
    I4 bad[4] = {};
    for (std::size_t j = 0; j < kBlock; j += 16) {
      for (std::size_t k = 0; k < 4; ++k) {
        bad[k] |= ((U4)load4(&x[i + j + 4 * k]) & exponent) == exponent;
      }
    }
    if (bits_of((bad[0] | bad[1]) | (bad[2] | bad[3])) != 0) break;
  }
  while (i < x.size() && std::isfinite(x[i])) ++i;
  return i;
}

// The smallest float that is not below v, within the finite floats.
float float_not_below(double v) {
  const float f = static_cast<float>(std::clamp<double>(v, -kMaxFloat, kMaxFloat));
  return static_cast<double>(f) < v ? std::nextafter(f, kInf) : f;
}

template <class T>
[[noreturn]] void out_of_range(const char* name, T value, const char* range) {
  std::ostringstream s;
  s.precision(17);
  s << name << " is " << value << "; expected " << range;
  throw InvalidArgument(s.str());
}

void check(const SamplerParams& p, std::int32_t n_vocab) {
  if (n_vocab < 1) out_of_range("n_vocab", n_vocab, "at least 1");
  if (!(std::isfinite(p.temperature) && p.temperature >= 0)) {
    out_of_range("temperature", p.temperature, "a finite number >= 0 (0 takes the most probable token)");
  }
  if (p.top_k < 0) out_of_range("top_k", p.top_k, "at least 0 (0 is off)");
  if (!(p.top_p >= 0 && p.top_p <= 1)) out_of_range("top_p", p.top_p, "0 to 1 (1 is off)");
  if (!(p.min_p >= 0 && p.min_p <= 1)) out_of_range("min_p", p.min_p, "0 to 1 (0 is off)");
  if (!(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0)) {
    out_of_range("repetition_penalty", p.repetition_penalty, "a finite number > 0 (1 is off)");
  }
  if (!std::isfinite(p.presence_penalty)) {
    out_of_range("presence_penalty", p.presence_penalty, "a finite number (0 is off)");
  }
  if (!std::isfinite(p.frequency_penalty)) {
    out_of_range("frequency_penalty", p.frequency_penalty, "a finite number (0 is off)");
  }
  if (p.penalty_window < 0 || p.penalty_window > kMaxWindow) {
    out_of_range("penalty_window", p.penalty_window, "0 (off) to 1048576 tokens");
  }
  std::vector<bool> banned;
  std::int32_t n_banned = 0;
  for (const auto& [id, bias] : p.logit_bias) {
    const std::string name = "logit_bias[" + std::to_string(id) + "]";
    if (id < 0 || id >= n_vocab) {
      throw InvalidArgument(name + ": there is no such token; expected an id from 0 to " +
                            std::to_string(n_vocab - 1));
    }
    if (std::isnan(bias) || bias == kInf) {
      out_of_range(name.c_str(), bias, "a finite number, or minus infinity to ban the token");
    }
    if (std::isfinite(bias)) continue;
    banned.resize(static_cast<std::size_t>(n_vocab));
    if (!banned[static_cast<std::size_t>(id)]) ++n_banned;
    banned[static_cast<std::size_t>(id)] = true;
  }
  if (n_banned == n_vocab) {
    throw InvalidArgument("logit_bias bans all " + std::to_string(n_vocab) +
                          " tokens; leave at least one without minus infinity");
  }
}

[[noreturn]] void not_finite(float value, std::size_t index, const char* expected) {
  std::ostringstream s;
  s << "logit " << index << " is " << value << "; expected " << expected;
  throw NumericError(s.str());
}

// The largest logit, for the functions that accept minus infinity.
float checked_max(std::span<const float> logits) {
  if (logits.empty()) throw InvalidArgument("logits are empty; expected one per token of the vocabulary");
  for (std::size_t i = first_not_finite(logits); i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == kInf) {
      not_finite(logits[i], i, "a finite number or minus infinity");
    }
  }
  Block tail, edge;
  const Row row(logits, tail, edge);
  float largest = -kInf;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) largest = std::max(largest, max_of_block(row.block(b)));
  if (largest == -kInf) throw NumericError("every logit is minus infinity; expected at least one finite");
  return largest;
}

// ln of the sum of exp(logits - max).
double log_of_sum(std::span<const float> logits, float max) {
  Block tail, edge, weights;
  const Row row(logits, tail, edge);
  const Weigher weigh(max, 1);
  double sum = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    sum += weigh.block(row.block(b), weigh.least(), weights.data());
  }
  return std::log(sum);
}

}  // namespace

struct Sampler::Impl {
  SamplerParams params;
  std::size_t n_vocab;
  bool penalize;    // a penalty is on and its window is not 0
  float inv_t = 0;  // 1 / temperature
  double log_min_p = 0;
  Rng rng;

  std::vector<std::int32_t> window;  // ring of the latest tokens
  std::size_t window_used = 0;
  std::size_t window_next = 0;
  std::vector<std::int32_t> counts;  // [n_vocab] occurrences in the window

  Block tail, edge;              // of the row
  std::vector<float> few;        // [blocks of n_needed logits] those that a draw is from, else minus infinity
  std::vector<float> adjusted;   // [n_vocab] logits with bias and penalties
  std::vector<float> block_max;  // [n_blocks]
  std::vector<double> block_cum;  // [n_blocks] running sum of the bounds that the draw uses
  Truncation truncation;

  Impl(std::int32_t n, SamplerParams p) : params(std::move(p)), rng(params.seed) {
    check(params, n);
    n_vocab = static_cast<std::size_t>(n);
    const bool penalties =
        params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0;
    penalize = penalties && params.penalty_window > 0;
    if (params.temperature > 0) {
      inv_t = static_cast<float>(std::min(1 / params.temperature, static_cast<double>(kMaxFloat)));
    }
    if (params.min_p > 0) log_min_p = log_positive(params.min_p);

    const std::size_t n_blocks = blocks_for(n_vocab);
    block_max.resize(n_blocks);
    block_cum.resize(n_blocks);
    if (penalize) {
      window.resize(static_cast<std::size_t>(params.penalty_window));
      counts.resize(n_vocab);
    }
    if (penalize || !params.logit_bias.empty()) adjusted.resize(n_vocab);
    if (params.temperature > 0 && (top_k_on() || params.top_p < 1)) truncation = Truncation(n_vocab);
    if (params.temperature > 0 && n_needed() < n_vocab) {
      few.resize(std::min(n_needed(), n_blocks) * kBlock, -kInf);
    }
  }

  bool top_k_on() const { return params.top_k > 0 && static_cast<std::size_t>(params.top_k) < n_vocab; }

  std::size_t n_needed() const {
    if (!adjusted.empty()) return n_vocab;
    if (params.temperature == 0) return 1;
    const auto k = static_cast<std::size_t>(params.top_k);
    return top_k_on() && k <= kFew ? k : n_vocab;
  }

  void push(std::int32_t token) noexcept {
    if (!penalize) return;
    if (window_used == window.size()) {
      --counts[static_cast<std::size_t>(window[window_next])];
    } else {
      ++window_used;
    }
    window[window_next] = token;
    window_next = window_next + 1 == window.size() ? 0 : window_next + 1;
    ++counts[static_cast<std::size_t>(token)];
  }

  // The logits with bias and penalties.
  std::span<const float> adjust(std::span<const float> logits) {
    if (params.logit_bias.empty() && window_used == 0) return logits;
    std::copy(logits.begin(), logits.end(), adjusted.begin());
    const auto saturate = [](double v) { return std::clamp<double>(v, -kMaxFloat, kMaxFloat); };
    for (const auto& [id, bias] : params.logit_bias) {
      float& x = adjusted[static_cast<std::size_t>(id)];
      x = bias == -kInf || x == -kInf ? -kInf : static_cast<float>(saturate(x + bias));
    }
    // Each distinct token once: its count is negated while the loop has still to meet it again.
    for (std::size_t i = 0; i < window_used; ++i) {
      const auto id = static_cast<std::size_t>(window[i]);
      const std::int32_t count = counts[id];
      if (count < 0) continue;
      counts[id] = -count;
      float& x = adjusted[id];
      if (x == -kInf) continue;
      double v = x;
      v = saturate(v > 0 ? v / params.repetition_penalty : v * params.repetition_penalty);
      v = saturate(v - params.presence_penalty);
      x = static_cast<float>(saturate(v - count * params.frequency_penalty));
    }
    for (std::size_t i = 0; i < window_used; ++i) {
      std::int32_t& count = counts[static_cast<std::size_t>(window[i])];
      count = std::abs(count);
    }
    return adjusted;
  }

  // Draws among the tokens that are kept, by rejection (von Neumann 1951). A block is proposed in proportion
  // to its largest weight, and one of its kBlock places evenly; that is accepted with its weight over the
  // largest one, and never if it is not kept. So a token is returned in proportion to its weight. A block
  // that is proposed holds a token of its largest weight, so fewer than kBlock proposals are expected.
  std::size_t draw(const Row& row, float max) {
    const Weigher weigh(max, inv_t);
    double total = 0;
    for (std::size_t b = 0; b < row.n_blocks(); ++b) {
      if (block_max[b] >= row.lowest(b)) total += static_cast<double>(weigh(block_max[b]));
      block_cum[b] = total;
    }
    while (true) {
      const auto end = block_cum.begin() + static_cast<std::ptrdiff_t>(row.n_blocks());
      const auto found = std::upper_bound(block_cum.begin(), end, rng.uniform() * total);
      if (found == end) continue;  // the product was rounded up to the total
      const auto b = static_cast<std::size_t>(found - block_cum.begin());
      static_assert(kBlock == 256);
      const std::uint64_t bits = rng.next();
      const std::size_t i = bits >> 56;
      const double u = static_cast<double>(bits & ((std::uint64_t{1} << 53) - 1)) * 0x1p-53;
      const float x = row.block(b)[i];
      if (x < row.lowest(b)) continue;
      if (u * static_cast<double>(weigh(block_max[b])) < static_cast<double>(weigh(x))) {
        return b * kBlock + i;
      }
    }
  }

  std::int32_t sample(std::span<const float> logits) {
    if (logits.size() != n_vocab) {
      throw InvalidArgument("there are " + std::to_string(logits.size()) + " logits; expected " +
                            std::to_string(n_vocab) + ", one per token of the vocabulary");
    }
    const std::size_t bad = first_not_finite(logits);
    if (bad < n_vocab) not_finite(logits[bad], bad, "a finite number; the model's output is unusable");

    Row row(adjust(logits), tail, edge);
    const auto token = static_cast<std::int32_t>(pick(row));
    push(token);
    return token;
  }

  // The row's place of the token.
  std::size_t pick(Row& row) {
    const std::span<float> maxima = std::span(block_max).first(row.n_blocks());
    const float max = block_maxima(row, maxima);
    if (params.temperature == 0) {
      const std::size_t b = index_of(max, maxima.data(), maxima.size());
      return b * kBlock + index_of(max, row.block(b), kBlock);
    }
    if (top_k_on()) row.keep(truncation.top_k(row, maxima, max, static_cast<std::size_t>(params.top_k)));
    if (params.top_p < 1) row.keep(truncation.top_p(row, maxima, max, params.top_p));
    if (params.min_p > 0) {
      const float lowest = float_not_below(max + log_min_p);
      if (lowest > row.cut().lowest) row.keep({lowest, kAll});
    }
    return draw(row, max);
  }

  // Of a row only the blocks that have one of these logits are made, with minus infinity for what is not
  // among them: truncation drops that before anything is summed or drawn, so all is as with the whole row.
  std::int32_t sample(std::span<const std::int32_t> ids, std::span<const float> logits) {
    const std::size_t n = n_needed();
    if (n == n_vocab) {
      throw InvalidArgument("the draw depends on all logits: give sample() the whole row, without ids");
    }
    if (ids.size() < n || logits.size() != ids.size()) {
      throw InvalidArgument("there are " + std::to_string(ids.size()) + " ids and " +
                            std::to_string(logits.size()) + " logits; expected as many of each, at least " +
                            std::to_string(n));
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (ids[i] < 0 || static_cast<std::size_t>(ids[i]) >= n_vocab) {
        throw InvalidArgument("id " + std::to_string(i) + " is " + std::to_string(ids[i]) +
                              "; expected 0 to " + std::to_string(n_vocab - 1));
      }
      if (!std::isfinite(logits[i])) {
        not_finite(logits[i], static_cast<std::size_t>(ids[i]),
                   "a finite number; the model's output is unusable");
      }
    }
    if (params.temperature == 0) return ids[0];

    std::array<std::size_t, kFew> blocks;  // ascending
    for (std::size_t i = 0; i < n; ++i) blocks[i] = static_cast<std::size_t>(ids[i]) / kBlock;
    const auto end_of_ids = blocks.begin() + static_cast<std::ptrdiff_t>(n);
    std::sort(blocks.begin(), end_of_ids);
    const auto end = std::unique(blocks.begin(), end_of_ids);
    const auto fill = [&](auto value_of) {
      for (std::size_t i = 0; i < n; ++i) {
        const auto id = static_cast<std::size_t>(ids[i]);
        const auto b =
            static_cast<std::size_t>(std::lower_bound(blocks.begin(), end, id / kBlock) - blocks.begin());
        few[b * kBlock + id % kBlock] = value_of(i);
      }
    };
    fill([&](std::size_t i) { return logits[i]; });
    Row row(std::span<const float>(few).first(static_cast<std::size_t>(end - blocks.begin()) * kBlock), tail,
            edge);
    const std::size_t at = pick(row);
    fill([](std::size_t) { return -kInf; });
    return static_cast<std::int32_t>(blocks[at / kBlock] * kBlock + at % kBlock);
  }
};

Sampler::Sampler(std::int32_t n_vocab, SamplerParams params)
    : impl_(std::make_unique<Impl>(n_vocab, std::move(params))) {}
Sampler::~Sampler() = default;
Sampler::Sampler(const Sampler& other) : impl_(std::make_unique<Impl>(*other.impl_)) {}
Sampler& Sampler::operator=(const Sampler& other) {
  *impl_ = *other.impl_;
  return *this;
}
Sampler::Sampler(Sampler&&) noexcept = default;
Sampler& Sampler::operator=(Sampler&&) noexcept = default;

std::int32_t Sampler::sample(std::span<const float> logits) { return impl_->sample(logits); }
std::int32_t Sampler::sample(std::span<const std::int32_t> ids, std::span<const float> logits) {
  return impl_->sample(ids, logits);
}
std::int32_t Sampler::n_needed() const noexcept { return static_cast<std::int32_t>(impl_->n_needed()); }

void Sampler::accept(std::span<const std::int32_t> tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || static_cast<std::size_t>(tokens[i]) >= impl_->n_vocab) {
      throw InvalidArgument("token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                            "; expected an id from 0 to " + std::to_string(impl_->n_vocab - 1));
    }
  }
  for (const std::int32_t token : tokens) impl_->push(token);
}

void Sampler::reset() noexcept {
  impl_->rng = Rng(impl_->params.seed);
  impl_->window_used = impl_->window_next = 0;
  std::fill(impl_->counts.begin(), impl_->counts.end(), 0);
}

std::int32_t Sampler::n_vocab() const noexcept { return static_cast<std::int32_t>(impl_->n_vocab); }
const SamplerParams& Sampler::params() const noexcept { return impl_->params; }

std::int32_t argmax(std::span<const float> logits) {
  const float max = checked_max(logits);
  return static_cast<std::int32_t>(index_of(max, logits.data(), logits.size()));
}

float log_probability(std::span<const float> logits, std::int32_t id) {
  const float max = checked_max(logits);
  if (id < 0 || static_cast<std::size_t>(id) >= logits.size()) {
    throw InvalidArgument("token id is " + std::to_string(id) + "; expected 0 to " +
                          std::to_string(logits.size() - 1));
  }
  const double x = logits[static_cast<std::size_t>(id)];
  return static_cast<float>(x - max - log_of_sum(logits, max));
}

std::vector<LogProb> top_log_probabilities(std::span<const float> logits, std::int32_t k) {
  const float max = checked_max(logits);
  if (k < 0) out_of_range("k", k, "at least 0");
  const std::size_t n = std::min(static_cast<std::size_t>(k), logits.size());
  const double lse = log_of_sum(logits, max);
  std::vector<LogProb> best;
  best.reserve(n);
  // A heap of the best so far, the worst of them on top; most tokens fail its comparison.
  const auto better = [](const LogProb& a, const LogProb& b) {
    return a.logprob > b.logprob || (a.logprob == b.logprob && a.id < b.id);
  };
  for (std::size_t i = 0; n > 0 && i < logits.size(); ++i) {
    if (best.size() == n) {
      if (!(logits[i] > best.front().logprob)) continue;
      std::pop_heap(best.begin(), best.end(), better);
      best.pop_back();
    }
    best.push_back({static_cast<std::int32_t>(i), logits[i]});
    std::push_heap(best.begin(), best.end(), better);
  }
  std::sort_heap(best.begin(), best.end(), better);
  for (LogProb& p : best) p.logprob = static_cast<float>(static_cast<double>(p.logprob) - max - lse);
  return best;
}

}  // namespace ringlm

// From logits to a token. One sampler belongs to one stream of text: it holds the random state and the
// window of recent tokens that the penalties look at.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace ringlm {

struct SamplerParams {
  double temperature = 0.8;          // >= 0; 0 is argmax
  std::int32_t top_k = 40;           // >= 0; 0 is off
  double top_p = 0.95;               // 0..1; 1 is off
  double min_p = 0.05;               // 0..1; 0 is off
  double repetition_penalty = 1.0;   // > 0; 1 is off; divides positive logits, multiplies negative ones
  double presence_penalty = 0.0;     // subtracted once from every token in the window
  double frequency_penalty = 0.0;    // subtracted once per occurrence in the window
  std::int32_t penalty_window = 64;  // most recent tokens that the penalties see, at most 2^20; 0 is none
  std::vector<std::pair<std::int32_t, double>> logit_bias;  // (token id, added to its logit); -inf bans
  std::uint64_t seed = 0;
};

struct LogProb {
  std::int32_t id;
  float logprob;  // natural logarithm, of the unmodified softmax over all logits
};

// The same logits, parameters and seed give the same tokens on every machine: the arithmetic is IEEE
// addition, multiplication and division in a fixed order, without the C library's exp or log.
class Sampler {
 public:
  // Throws InvalidArgument for a parameter out of range, and when logit_bias bans every token. n_vocab
  // fixes the size of every scratch buffer; nothing is allocated later.
  Sampler(std::int32_t n_vocab, SamplerParams params);
  ~Sampler();
  // A copy continues on its own with the same random state and window.
  Sampler(const Sampler& other);
  Sampler& operator=(const Sampler& other);
  Sampler(Sampler&&) noexcept;
  Sampler& operator=(Sampler&&) noexcept;

  // Draws one token from logits [n_vocab] and enters it into the penalty window. Order: logit bias,
  // penalties (repetition, presence, frequency), top-k, top-p, min-p, temperature, draw. Each truncation
  // renormalizes at temperature 1, keeps the lower id of equal logits and at least one token; top-p keeps
  // the token that crosses p. A modified logit saturates at the largest finite float. Throws NumericError
  // on NaN or infinity and InvalidArgument on a wrong size; the sampler is then as before the call.
  std::int32_t sample(std::span<const float> logits);

  // The same draw from the n_needed() largest logits alone, or more, with their ids: the largest first, of
  // equals the lower id. Throws as above, and InvalidArgument where that is not enough, or all are needed.
  std::int32_t sample(std::span<const std::int32_t> ids, std::span<const float> logits);

  // On how many of the largest logits a draw depends: 1 at temperature 0, top_k up to 64. Else, and with
  // penalties or a bias, on all n_vocab.
  std::int32_t n_needed() const noexcept;

  // Enters tokens (a prompt) into the penalty window without drawing. Throws InvalidArgument for an
  // unknown id; the window is then as before the call.
  void accept(std::span<const std::int32_t> tokens);

  // Back to the seed, with an empty window.
  void reset() noexcept;

  std::int32_t n_vocab() const noexcept;
  const SamplerParams& params() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The functions below accept minus infinity (a masked token). They throw NumericError on NaN or plus
// infinity and when every logit is minus infinity, InvalidArgument when there is no logit.

// Index of the largest logit, the lowest one of equals.
std::int32_t argmax(std::span<const float> logits);

// Log-probability of one token. logits [n_vocab]. Throws InvalidArgument for an unknown id.
float log_probability(std::span<const float> logits, std::int32_t id);

// The k most probable tokens (all if k > n_vocab), most probable first, equals by ascending id.
// logits [n_vocab]. Throws InvalidArgument for k < 0.
std::vector<LogProb> top_log_probabilities(std::span<const float> logits, std::int32_t k);

}  // namespace ringlm

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
  float temperature = 0.8f;         // 0 is argmax
  std::int32_t top_k = 40;          // 0 is off
  float top_p = 0.95f;              // 1 is off
  float min_p = 0.05f;              // 0 is off
  float repetition_penalty = 1.0f;  // 1 is off; divides positive logits, multiplies negative ones
  float presence_penalty = 0.0f;    // subtracted once from every token in the window
  float frequency_penalty = 0.0f;   // subtracted once per occurrence in the window
  std::int32_t penalty_window = 64; // most recent tokens that the penalties see; 0 is none
  std::vector<std::pair<std::int32_t, float>> logit_bias;  // (token id, added to its logit)
  std::uint64_t seed = 0;
};

struct LogProb {
  std::int32_t id;
  float logprob;  // natural logarithm, of the unmodified softmax over all logits
};

class Sampler {
 public:
  // Throws InvalidArgument for a parameter out of range. n_vocab fixes the size of every scratch
  // buffer; nothing is allocated later.
  Sampler(std::int32_t n_vocab, SamplerParams params);
  ~Sampler();
  Sampler(Sampler&&) noexcept;
  Sampler& operator=(Sampler&&) noexcept;

  // Draws one token from logits [n_vocab] and enters it into the penalty window. Order: logit bias and
  // penalties, top-k, top-p, min-p, temperature, draw. Throws NumericError on NaN or infinity (minus
  // infinity as a logit *bias* is how a caller bans a token) and InvalidArgument on a wrong size; the
  // sampler is then as before the call.
  std::int32_t sample(std::span<const float> logits);

  // Enters tokens (a prompt) into the penalty window without drawing.
  void accept(std::span<const std::int32_t> tokens);

  // Back to the seed, with an empty window.
  void reset() noexcept;

  const SamplerParams& params() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Index of the largest logit, the lowest one of equals. Throws NumericError on NaN.
std::int32_t argmax(std::span<const float> logits);

// Log-probability of one token. logits [n_vocab].
float log_probability(std::span<const float> logits, std::int32_t id);

// The k most probable tokens, most probable first, equals by ascending id. logits [n_vocab].
std::vector<LogProb> top_log_probabilities(std::span<const float> logits, std::int32_t k);

}  // namespace ringlm

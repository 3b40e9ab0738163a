// The families of models that ringlm runs: what GGUF's metadata leaves to the name of the architecture.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ringlm/config.h"

namespace ringlm {

struct Architecture {
  std::string_view name;  // general.architecture
  RopePairing pairing;
  Norms norms = Norms::Before;
  QkNorm qk_norm = QkNorm::None;
  Activation activation = Activation::Silu;
  bool qkv_bias = false;             // Q, K and V have a bias, always
  const char* required_key = "";     // that has no default
  bool scaled_embedding = false;     // by sqrt(n_embd)
  bool experts = false;              // may have some
  bool expert_weights_norm = false;  // where the file does not say
  bool narrow_experts = false;       // expert_feed_forward_length is n_ff / n_expert_used by default
  bool shared_expert = false;        // expert_shared_feed_forward_length is n_ff by default
  std::int32_t ff_matrices = 1;      // feed_forward_length is so many times the rows of a matrix
  std::int32_t window = 0;           // where the file does not say
  std::int32_t window_period = 0;    // every so many layers one has no window, where the file does not say
  double attn_softcap = 0.0, final_softcap = 0.0;  // where the file does not say
  std::int32_t rope_period = 0;                    // every so many layers one turns nothing
  double window_rope_base = 0.0;      // of the layers with a window, where the file does not say; 0: the same
  bool window_rope_plain = false;     // layers with a window turn by the base alone, without scaling
  std::int32_t wide_head_layers = 0;  // n_layer of the size whose scores are scaled by n_embd / n_head
  bool finetuned_means_rope = false;  // rope.scaling.finetuned false: nothing turns
  bool context_is_scaled = false;     // context_length is the length behind a linear scaling
};

// Throws UnsupportedModelError, which lists what there is.
const Architecture& architecture(std::string_view name);

}  // namespace ringlm

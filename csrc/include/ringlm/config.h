// What an architecture is, as data. Everything that the operations need to know of a model apart from
// its weights. Filled from GGUF metadata (model/config.cpp); the key of each field stands beside it, with
// {arch} left out.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace ringlm {

// Which elements of a head turn together. GGUF files of some architectures store Q and K permuted for
// Interleaved; others keep the Hugging Face order, Halves.
enum class RopePairing {
  Interleaved,  // (x[2i], x[2i+1])
  Halves,       // (x[i], x[i + n/2])
};

enum class RopeScaling {
  None,
  Linear,      // positions are divided by the factor (arXiv:2306.15595)
  Ntk,         // base * factor^(d / (d - 2))
  DynamicNtk,  // the same by the length in use, above the original one
  Yarn,        // fast pairs as they are, slow ones divided by the factor, a ramp between (arXiv:2309.00071)
  Llama3,      // the same by wavelength
  LongRope,    // factors of each pair, others above the original length (arXiv:2402.13753)
};

// How positions turn pairs: model/rope.cpp has the formulas.
struct Rope {
  RopeScaling scaling = RopeScaling::None;  // rope.scaling.type; rope_factors_*.weight make it LongRope
  double base = 10000.0;                    // rope.freq_base
  double factor = 1.0;                      // rope.scaling.factor
  double original = 0.0;                    // rope.scaling.original_context_length, default context_length
  double attn_factor = 0.0;  // rope.scaling.attn_factor: cos and sin are multiplied by it. 0: by the formula
  double beta_fast = 32.0, beta_slow = 1.0;  // rope.scaling.yarn_beta_*: turns over the original length
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // of Llama3, in turns over the original length
  // [rope_dims / 2] each frequency is divided by it: rope_freqs.weight or rope_factors_short.weight, and
  // rope_factors_long.weight above the original length. Empty: ones.
  std::vector<float> factors, long_factors;
};

enum class Activation {
  Silu,  // x sigmoid(x)
  Gelu,  // its approximation by tanh (arXiv:1606.08415)
};

// RMSNorm on the way into a layer's halves, on the way out of them, or both.
enum class Norms { Before, After, Both };

enum class QkNorm {
  None,
  Head,  // of every head by itself
  Full,  // over all heads
};

struct Config {
  std::string architecture;  // general.architecture
  std::string name;          // general.name, or empty

  std::int32_t n_vocab = 0;      // rows of token_embd.weight
  std::int32_t n_embd = 0;       // embedding_length
  std::int32_t n_layer = 0;      // block_count
  std::int32_t n_head = 0;       // attention.head_count: query heads
  std::int32_t n_head_kv = 0;    // attention.head_count_kv, default n_head
  std::int32_t head_dim = 0;     // attention.key_length, default n_embd / n_head
  std::int32_t n_ff = 0;         // feed_forward_length, of layers without experts; 0 where all have some
  std::int32_t n_ctx_train = 0;  // context_length
  std::int64_t n_ctx_limit =
      0;  // the tokens that it reads: n_ctx_train, times a scaling that this leaves out

  std::int32_t n_expert = 0;       // expert_count; 0: none
  std::int32_t n_expert_used = 0;  // expert_used_count: for each token
  std::int32_t n_ff_expert = 0;    // expert_feed_forward_length
  std::int32_t n_ff_shared = 0;    // expert_shared_feed_forward_length: of an expert for every token; 0: none
  bool expert_weights_norm = false;  // expert_weights_norm: the weights of a token's experts sum to one

  bool qkv_bias = false;  // Q, K and V must have a bias; else they may
  Norms norms = Norms::Before;
  QkNorm qk_norm = QkNorm::None;
  Activation activation = Activation::Silu;
  float norm_eps = 1e-5f;  // attention.layer_norm_rms_epsilon

  RopePairing rope_pairing = RopePairing::Interleaved;
  std::int32_t rope_dims = 0;         // rope.dimension_count; the rest of a head does not turn
  std::vector<Rope> ropes;            // one, or a second for the layers with a window (rope.freq_base_swa)
  std::vector<std::int32_t> rope_of;  // [n_layer] which of them, or -1: positions do not turn anything

  std::vector<std::int32_t> windows;  // [n_layer] attention.sliding_window: a query sees that many of the
                                      // last positions, its own included; 0: all

  float embedding_scale = 1.0f;  // embedding_scale: of the embedding
  float residual_scale = 1.0f;   // residual_scale: of what is added to the residual stream
  float attention_scale = 0.0f;  // attention.scale: of scores; default 1 / sqrt(head_dim)
  float logit_scale = 1.0f;      // 1 / logit_scale: of logits
  float attn_softcap = 0.0f;   // attn_logit_softcapping: scores become cap tanh(score / cap); 0: they do not
  float final_softcap = 0.0f;  // final_logit_softcapping: the same of logits

  std::int32_t group() const { return n_head / n_head_kv; }     // query heads per KV head
  std::int32_t q_dim() const { return n_head * head_dim; }      // width of the query projection
  std::int32_t kv_dim() const { return n_head_kv * head_dim; }  // width of the key and value projections
  // Width of all of a token's experts together.
  std::int32_t n_ff_slots() const { return n_expert_used * n_ff_expert + n_ff_shared; }
  std::int32_t n_slots() const { return n_expert_used + (n_ff_shared > 0 ? 1 : 0); }  // experts of a token
};

}  // namespace ringlm

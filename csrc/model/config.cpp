#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "model/architecture.h"
#include "model/keys.h"
#include "model/rope_config.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

constexpr std::int32_t kMaxExperts = 1 << 14;
constexpr std::int32_t kMaxHeadDim = 1 << 14;  // every thread holds a tile of keys and values as float32

// Which layers have the window: as the file says, or all but every `period`-th; none where there is no period
// and no pattern, since then all have it.
std::vector<std::int32_t> read_windows(const Keys& keys, const Architecture& a, std::int32_t n_layer) {
  const auto n = static_cast<std::size_t>(n_layer);
  const std::string window_key = keys.full("attention.sliding_window");
  const std::uint64_t window = keys.file.get_uint(window_key).value_or(static_cast<std::uint64_t>(a.window));
  if (window == 0) return std::vector<std::int32_t>(n, 0);
  // Some files say "none" by a number that no text reaches.
  std::vector<std::int32_t> windows(n, static_cast<std::int32_t>(std::min<std::uint64_t>(window, kMaxDim)));
  const std::string pattern_key = keys.full("attention.sliding_window_pattern");
  const gguf::Value* pattern = keys.file.find(pattern_key);
  if (pattern && pattern->type == gguf::ValueType::Array) {
    const std::vector<bool> has = Keys::flags(pattern_key, *pattern, n);
    for (std::size_t i = 0; i < n; ++i) {
      if (!has[i]) windows[i] = 0;
    }
    return windows;
  }
  const std::uint64_t period =
      keys.file.get_uint(pattern_key).value_or(static_cast<std::uint64_t>(a.window_period));
  for (std::size_t i = 0; period > 0 && i < n; ++i) {
    if (i % period == period - 1) windows[i] = 0;
  }
  return windows;
}

void read_experts(const Keys& keys, const Architecture& a, Config& c) {
  const std::string name = keys.full("expert_count");
  if (keys.file.get_uint(name).value_or(0) == 0) return;
  c.n_expert = keys.count("expert_count");
  if (!a.experts) {
    throw UnsupportedModelError("'" + name + "' is " + std::to_string(c.n_expert) + "; in '" +
                                c.architecture + "' experts are not supported");
  }
  c.n_expert_used = keys.count("expert_used_count");
  if (c.n_expert_used > c.n_expert) {
    throw FileFormatError("'" + keys.full("expert_used_count") + "' is " + std::to_string(c.n_expert_used) +
                          "; there are " + std::to_string(c.n_expert) + " experts");
  }
  c.n_ff_expert = keys.count("expert_feed_forward_length", c.n_ff / (a.narrow_experts ? c.n_expert_used : 1));
  const std::uint64_t shared = keys.file.get_uint(keys.full("expert_shared_feed_forward_length"))
                                   .value_or(a.shared_expert ? static_cast<std::uint64_t>(c.n_ff) : 0);
  if (shared != 0) c.n_ff_shared = keys.count("expert_shared_feed_forward_length", c.n_ff);
  const std::int64_t width = std::int64_t{c.n_expert_used} * c.n_ff_expert + c.n_ff_shared;
  if (c.n_expert > kMaxExperts || width > kMaxDim) {
    throw FileFormatError("'" + name + "' is " + std::to_string(c.n_expert) +
                          " and the experts of a token are " + std::to_string(width) +
                          " wide together; expected at most " + std::to_string(kMaxExperts) + " and " +
                          std::to_string(kMaxDim));
  }
  // No buffer is made for what no layer has, and no tensor confirms.
  const auto has_router = [&](std::int32_t layer) {
    return keys.file.find_tensor("blk." + std::to_string(layer) + ".ffn_gate_inp.weight") != nullptr;
  };
  std::int32_t layer = 0;
  while (layer < c.n_layer && has_router(layer)) ++layer;
  if (layer == c.n_layer) c.n_ff = 0;
  c.expert_weights_norm =
      keys.file.get_bool(keys.full("expert_weights_norm")).value_or(a.expert_weights_norm);
  if (const auto f = keys.file.get_uint(keys.full("expert_gating_func")).value_or(0); f > 1) {
    throw UnsupportedModelError("'" + keys.full("expert_gating_func") + "' is " + std::to_string(f) +
                                "; supported is 1, softmax");
  }
  if (const auto n = keys.file.get_uint(keys.full("expert_group_count")).value_or(0); n > 1) {
    throw UnsupportedModelError("'" + keys.full("expert_group_count") + "' is " + std::to_string(n) +
                                "; only 1 is supported");
  }
  if (const double x = keys.file.get_float(keys.full("expert_weights_scale")).value_or(0.0);
      x != 0.0 && x != 1.0) {
    throw UnsupportedModelError("'" + keys.full("expert_weights_scale") + "' is " + Keys::text(x) +
                                "; only 1 is supported");
  }
}

}  // namespace

Config read_config(const gguf::File& file) {
  const auto arch = file.get_string("general.architecture");
  if (!arch)
    throw FileFormatError(
        "key 'general.architecture' is missing: this GGUF file does not say what model it holds");
  const Architecture& a = architecture(*arch);
  const Keys keys{file, std::string(*arch)};

  Config c;
  c.architecture = *arch;
  c.name = std::string(file.get_string("general.name").value_or(""));

  const gguf::Tensor* embd = file.find_tensor("token_embd.weight");
  if (!embd) {
    throw UnsupportedModelError(
        file.tensors().empty() ? "the file holds no tensors (a vocabulary alone): there is nothing to run"
                               : "tensor 'token_embd.weight' is missing");
  }
  if (embd->n_dims != 2 || embd->dims[1] > static_cast<std::uint64_t>(kMaxDim)) {
    throw FileFormatError("tensor 'token_embd.weight' should be a matrix [n_vocab, n_embd]");
  }
  c.n_vocab = static_cast<std::int32_t>(embd->dims[1]);

  c.n_embd = keys.count("embedding_length");
  c.n_layer = keys.count("block_count");
  c.n_head = keys.count("attention.head_count");
  c.n_head_kv = keys.count("attention.head_count_kv", c.n_head);
  c.n_ff = keys.count("feed_forward_length");
  if (c.n_ff % a.ff_matrices != 0) {
    throw FileFormatError("'" + keys.full("feed_forward_length") + "' is " + std::to_string(c.n_ff) +
                          "; expected a multiple of " + std::to_string(a.ff_matrices));
  }
  c.n_ff /= a.ff_matrices;
  c.n_ctx_train = keys.count("context_length");
  if (c.n_head % c.n_head_kv != 0) {
    throw FileFormatError("'" + keys.full("attention.head_count") + "' is " + std::to_string(c.n_head) +
                          " and '" + keys.full("attention.head_count_kv") + "' is " +
                          std::to_string(c.n_head_kv) +
                          "; the query heads must divide evenly among the KV heads");
  }
  if (!file.find(keys.full("attention.key_length")) && c.n_embd % c.n_head != 0) {
    throw FileFormatError("'" + keys.full("attention.head_count") + "' is " + std::to_string(c.n_head) +
                          ", which does not divide the embedding length " + std::to_string(c.n_embd) +
                          ", and there is no '" + keys.full("attention.key_length") + "'");
  }
  c.head_dim = keys.count("attention.key_length", c.n_embd / c.n_head);
  const std::string head_key = "'" + keys.full("attention.key_length") + "' (elements of a head) is ";
  if (c.head_dim > kMaxHeadDim) {
    throw UnsupportedModelError(head_key + std::to_string(c.head_dim) + "; at most " +
                                std::to_string(kMaxHeadDim) + " are supported");
  }
  if (const auto v = keys.count("attention.value_length", c.head_dim); v != c.head_dim) {
    throw UnsupportedModelError(head_key + std::to_string(c.head_dim) + " and '" +
                                keys.full("attention.value_length") + "' is " + std::to_string(v) +
                                "; both must have the same size");
  }
  // Products of these are sizes of matrices and caches; they must stay inside 32 bits.
  constexpr std::int64_t kMaxWidth = std::numeric_limits<std::int32_t>::max() / 4;
  if (std::int64_t{c.n_head} * c.head_dim > kMaxWidth) {
    throw FileFormatError("'" + keys.full("attention.head_count") + "' times the head size is " +
                          std::to_string(std::int64_t{c.n_head} * c.head_dim) + "; expected at most " +
                          std::to_string(kMaxWidth));
  }

  if (*a.required_key != '\0') keys.require(a.required_key, "the architecture '" + c.architecture + "'");
  c.qkv_bias = a.qkv_bias;
  c.norms = a.norms;
  c.qk_norm = a.qk_norm;
  c.activation = a.activation;
  c.rope_pairing = a.pairing;
  c.rope_dims = keys.count("rope.dimension_count", c.head_dim);
  if (c.rope_dims > c.head_dim || c.rope_dims % 2 != 0) {
    throw FileFormatError("'" + keys.full("rope.dimension_count") + "' is " + std::to_string(c.rope_dims) +
                          "; expected an even number up to the head size " + std::to_string(c.head_dim));
  }
  c.ropes = {read_rope(keys, a, c)};
  if (a.context_is_scaled && !file.find(keys.full("rope.scaling.original_context_length"))) {
    c.ropes[0].original = c.n_ctx_train / c.ropes[0].factor;
  }
  c.n_ctx_limit = context_limit(c, c.ropes[0]);
  c.windows = read_windows(keys, a, c.n_layer);
  c.rope_of.assign(c.windows.size(), 0);
  for (std::size_t i = 0; a.rope_period > 0 && i < c.rope_of.size(); ++i) {
    if (static_cast<std::int32_t>(i) % a.rope_period == a.rope_period - 1) c.rope_of[i] = -1;
  }
  if (a.finetuned_means_rope && !file.get_bool(keys.full("rope.scaling.finetuned")).value_or(true)) {
    std::ranges::fill(c.rope_of, -1);
  }
  const double own_base = a.window_rope_plain ? c.ropes[0].base : a.window_rope_base;
  const double window_base = keys.number_or_0("rope.freq_base_swa", own_base, 1.0, 1e30);
  if (window_base != 0.0 && std::ranges::any_of(c.windows, [](std::int32_t w) { return w > 0; })) {
    Rope local;
    local.base = window_base;
    local.original = c.n_ctx_train;
    c.ropes.push_back(local);
    for (std::size_t i = 0; i < c.rope_of.size(); ++i) {
      if (c.windows[i] > 0 && c.rope_of[i] == 0) c.rope_of[i] = 1;
    }
  }

  const std::string eps_key = keys.full("attention.layer_norm_rms_epsilon");
  if (!file.find(eps_key)) throw FileFormatError("key '" + eps_key + "' is missing");
  c.norm_eps = static_cast<float>(keys.number("attention.layer_norm_rms_epsilon", 0.0, 1e-30, 1.0));

  read_experts(keys, a, c);
  const bool wide = c.n_layer == a.wide_head_layers;
  const double width = wide ? static_cast<double>(c.n_embd) / c.n_head : c.head_dim;
  c.attention_scale = keys.scale("attention.scale", 1.0 / std::sqrt(width));
  c.embedding_scale = keys.scale("embedding_scale", a.scaled_embedding ? std::sqrt(c.n_embd) : 1.0);
  c.residual_scale = keys.scale("residual_scale", 1.0);
  c.logit_scale = 1.0f / keys.scale("logit_scale", 1.0);
  c.attn_softcap = keys.cap("attn_logit_softcapping", a.attn_softcap);
  c.final_softcap = keys.cap("final_logit_softcapping", a.final_softcap);

  // Features that change the arithmetic and that nothing here computes.
  for (const char* key :
       {"attention.clamp_kqv", "attention.max_alibi_bias", "attention.output_scale",
        "router_logit_softcapping", "attention.temperature_length", "attention.key_length_mla",
        "attention.key_length_swa", "attention.shared_kv_layers", "leading_dense_block_count"}) {
    if (const double x = file.get_float(keys.full(key)).value_or(0.0); x != 0.0) {
      throw UnsupportedModelError("'" + keys.full(key) + "' is " + Keys::text(x) +
                                  "; models with it are not supported");
    }
  }
  if (const std::string key = keys.full("attention.causal"); !file.get_bool(key).value_or(true)) {
    throw UnsupportedModelError("'" + key +
                                "' is false; only models that read from left to right are supported");
  }
  return c;
}

}  // namespace ringlm

#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "gguf/blocks.h"
#include "model/architecture.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

constexpr std::int64_t kMaxDim = 1 << 24;  // far above any model; products of two stay inside 64 bits
constexpr std::int32_t kMaxExperts = 1 << 14;
constexpr std::int32_t kMaxHeadDim = 1 << 14;  // every thread holds a tile of keys and values as float32

struct Keys {
  const gguf::File& file;
  std::string arch;

  std::string full(const char* key) const { return arch + "." + key; }

  // A count that must be in [1, kMaxDim]. `fallback` < 0 makes the key required.
  std::int32_t count(const char* key, std::int64_t fallback = -1) const {
    const std::string name = full(key);
    const gguf::Value* v = file.find(name);
    const bool is_array = v && v->type == gguf::ValueType::Array;
    const auto found = is_array ? same_for_all(name, *v) : file.get_uint(name);
    if (!found && fallback < 0) {
      throw FileFormatError("key '" + name + "' is missing; the architecture '" + arch +
                            "' needs it: convert the model again");
    }
    const std::uint64_t n = found.value_or(static_cast<std::uint64_t>(fallback));
    if (n < 1 || n > static_cast<std::uint64_t>(kMaxDim)) {
      throw FileFormatError("'" + name + "' is " + std::to_string(n) + "; expected 1 to " +
                            std::to_string(kMaxDim));
    }
    return static_cast<std::int32_t>(n);
  }

  // The value of every layer, where it is one and the same.
  static std::optional<std::uint64_t> same_for_all(const std::string& name, const gguf::Value& array) {
    const std::vector<std::int64_t> values = gguf::to_ints(array, name);
    if (values.empty() || values[0] < 0 ||
        std::ranges::any_of(values, [&](std::int64_t x) { return x != values[0]; })) {
      throw UnsupportedModelError(
          "'" + name + "' is an array of " + std::to_string(values.size()) +
          " values (one per layer); only models whose layers all have the same shape are supported");
    }
    return static_cast<std::uint64_t>(values[0]);
  }

  // A number that must be in [least, most].
  double number(const char* key, double fallback, double least, double most) const {
    const std::string name = full(key);
    const double x = file.get_float(name).value_or(fallback);
    if (!(x >= least && x <= most)) {
      throw FileFormatError("'" + name + "' is " + text(x) + "; expected " + text(least) + " to " +
                            text(most));
    }
    return x;
  }

  // The same, or 0.
  double number_or_0(const char* key, double fallback, double least, double most) const {
    return file.get_float(full(key)).value_or(fallback) == 0.0 ? 0.0 : number(key, fallback, least, most);
  }

  // 0 is how some files say that there is none.
  float scale(const char* key, double fallback) const {
    const double x = number_or_0(key, 0.0, 1e-9, 1e9);
    return static_cast<float>(x == 0.0 ? fallback : x);
  }

  // 0: none. In float32, capped values are off by 1e-7 of the cap.
  float cap(const char* key, double fallback) const {
    return static_cast<float>(number_or_0(key, fallback, 1e-3, 1e3));
  }

  // n of them, one for each layer.
  static std::vector<bool> flags(const std::string& name, const gguf::Value& array, std::size_t n) {
    const std::vector<std::int64_t> found = gguf::to_ints(array, "'" + name + "'");
    if (found.size() != n) {
      throw FileFormatError("'" + name + "' has " + std::to_string(found.size()) + " values; the " +
                            std::to_string(n) + " layers need one each");
    }
    for (const std::int64_t flag : found) {
      if (flag == 0 || flag == 1) continue;
      throw FileFormatError("'" + name + "' holds " + std::to_string(flag) +
                            "; expected 0 or 1 for each layer");
    }
    return {found.begin(), found.end()};
  }

  static std::string text(double x) {
    std::ostringstream out;
    out << x;
    return out.str();
  }
};

constexpr const char* kRopeTensors[] = {"rope_freqs.weight", "rope_factors_short.weight",
                                        "rope_factors_long.weight"};

bool is_rope_factor(double f) { return f >= 1e-6 && f <= 1e6; }

// One number for each pair, or nothing.
std::vector<float> rope_factors(const gguf::File& file, const std::string& name, std::int32_t rope_dims) {
  const gguf::Tensor* t = file.find_tensor(name);
  if (!t) return {};
  const auto pairs = static_cast<std::size_t>(rope_dims / 2);
  const bool vector = t->dims[1] == 1 && t->dims[2] == 1 && t->dims[3] == 1;
  if (t->dims[0] != pairs || !vector || !can_dequantize(t->type)) {
    throw FileFormatError("tensor '" + name + "' should hold a number for each of the " +
                          std::to_string(pairs) + " pairs of a head");
  }
  std::vector<float> factors(pairs);
  dequantize(t->type, t->data, factors);
  for (const float f : factors) {
    if (is_rope_factor(f)) continue;
    throw FileFormatError("tensor '" + name + "' holds a factor of " + Keys::text(f) +
                          "; expected 1e-6 to 1e6");
  }
  return factors;
}

// Bounds that wavelengths are compared with, in turns over the original length.
bool ordered(double fast, double slow) { return slow > 0.0 && fast > slow; }

// A type that is not known must not be ignored: the model would run and answer nonsense beyond its first few
// thousand tokens.
Rope read_rope(const Keys& keys, const Architecture& a, const Config& c) {
  Rope rope;
  rope.base = keys.number("rope.freq_base", 10000.0, 1.0, 1e30);
  rope.original = keys.number("rope.scaling.original_context_length", c.n_ctx_train, 1.0, 1e9);
  rope.factors = rope_factors(keys.file, kRopeTensors[0], c.rope_dims);
  const double legacy = keys.number("rope.scale_linear", 1.0, 1.0, 1024.0);
  const bool none = keys.file.get_float(keys.full("rope.scaling.factor")) == 0.0;  // as some files say it
  const double factor = none ? 1.0 : keys.number("rope.scaling.factor", legacy, 1.0, 1024.0);
  const double attn_factor = keys.number_or_0("rope.scaling.attn_factor", 0.0, 1e-3, 1024.0);  // 0: none
  std::vector<float> short_factors = rope_factors(keys.file, kRopeTensors[1], c.rope_dims);
  std::vector<float> long_factors = rope_factors(keys.file, kRopeTensors[2], c.rope_dims);
  if (short_factors.empty() != long_factors.empty()) {
    throw FileFormatError(std::string("tensor '") + kRopeTensors[short_factors.empty() ? 1 : 2] +
                          "' is missing; LongRoPE needs the factors for short and for long texts");
  }
  const std::string type_key = keys.full("rope.scaling.type");
  const std::string fallback = long_factors.empty() ? "linear" : "longrope";
  std::string type(keys.file.get_string(type_key).value_or(fallback));
  if (type == "none" && !long_factors.empty()) type = "longrope";
  if (type == "longrope") {
    if (long_factors.empty()) {
      throw FileFormatError("'" + type_key + "' is 'longrope', but tensor '" + kRopeTensors[2] +
                            "' is missing");
    }
    if (!rope.factors.empty()) {
      throw FileFormatError(std::string("tensor '") + kRopeTensors[0] + "' and tensor '" + kRopeTensors[2] +
                            "' contradict each other: both have factors for all texts");
    }
    if (rope.original < 2.0) {
      throw FileFormatError("'" + keys.full("rope.scaling.original_context_length") + "' is " +
                            Keys::text(rope.original) + "; expected 2 or more");
    }
    rope.scaling = RopeScaling::LongRope;
    rope.factor = std::max(1.0, c.n_ctx_train / rope.original);
    rope.attn_factor = attn_factor;
    rope.factors = std::move(short_factors);
    rope.long_factors = std::move(long_factors);
    return rope;
  }
  if (type != "none" && type != "linear" && type != "yarn") {
    throw UnsupportedModelError("'" + type_key + "' is '" + type +
                                "'; supported are 'none', 'linear', 'yarn' and 'longrope'");
  }
  if (!long_factors.empty()) {
    throw UnsupportedModelError(std::string("tensor '") + kRopeTensors[2] + "' belongs to LongRoPE, but '" +
                                type_key + "' is '" + type + "'");
  }
  if (type != "yarn" || factor == 1.0) {
    rope.attn_factor = attn_factor;
    if (type == "none" || factor == 1.0) return rope;
    rope.scaling = RopeScaling::Linear;
    rope.factor = factor;
    return rope;
  }
  rope.factor = factor;
  rope.scaling = RopeScaling::Yarn;
  rope.beta_fast = keys.number("rope.scaling.yarn_beta_fast", 32.0, 0.0, 1e6);
  rope.beta_slow = keys.number("rope.scaling.yarn_beta_slow", 1.0, 0.0, 1e6);
  if (!ordered(rope.beta_fast, rope.beta_slow)) {
    throw FileFormatError("'" + keys.full("rope.scaling.yarn_beta_fast") + "' is " +
                          Keys::text(rope.beta_fast) + " and '" + keys.full("rope.scaling.yarn_beta_slow") +
                          "' is " + Keys::text(rope.beta_slow) +
                          "; expected the former to be larger, both positive");
  }
  // The file's is a multiple of the formula's, but for files of OLMo 3 that have the formula's itself.
  const double formula = 0.1 * std::log(factor) + 1.0;
  const bool absolute = a.window_rope_plain && std::fabs(attn_factor - formula) < 1e-4;
  rope.attn_factor = formula * (attn_factor == 0.0 || absolute ? 1.0 : attn_factor) *
                     keys.number("rope.scaling.yarn_attn_factor", 1.0, 1e-6, 1024.0);
  if (const double x = keys.number("rope.scaling.yarn_log_multiplier", 0.0, -1e6, 1e6); x != 0.0) {
    throw UnsupportedModelError("'" + keys.full("rope.scaling.yarn_log_multiplier") + "' is " +
                                Keys::text(x) + "; models with it are not supported");
  }
  if (const double x = keys.number("rope.scaling.yarn_ext_factor", 1.0, -1e6, 1e6); x != 1.0) {
    throw UnsupportedModelError("'" + keys.full("rope.scaling.yarn_ext_factor") + "' is " + Keys::text(x) +
                                "; only 1 is supported");
  }
  return rope;
}

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

// The trained length times the scaling, unless the file's length is that already.
std::int64_t context_limit(const Config& c, const Rope& rope) {
  const double scaled_length = rope.scaling == RopeScaling::None ? 0.0 : rope.original * rope.factor;
  return std::max<std::int64_t>(c.n_ctx_train, static_cast<std::int64_t>(scaled_length));
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

void set_rope(Config& c, const Rope& rope) {
  const auto require = [](bool good, const std::string& what) {
    if (!good) throw InvalidArgument("rope: " + what);
  };
  Rope r = rope;
  const Rope& own = c.ropes[0];
  if (r.base == 0.0) r.base = own.base;
  if (r.original == 0.0) r.original = own.original;
  const bool is_long = r.scaling == RopeScaling::LongRope;
  if (r.factor == 0.0) r.factor = is_long ? std::max(1.0, c.n_ctx_train / r.original) : 1.0;
  require(r.base >= 1.0 && r.base <= 1e30, "base is " + Keys::text(r.base) + "; expected 1 to 1e30");
  require(r.factor >= 1.0 && r.factor <= 1024.0,
          "factor is " + Keys::text(r.factor) + "; expected 1 to 1024");
  const double least = is_long ? 2.0 : 1.0;
  require(r.original >= least && r.original <= 1e9, "the original length is " + Keys::text(r.original) +
                                                        "; expected " + Keys::text(least) + " to 1e9 tokens");
  require(r.attn_factor >= 0.0 && r.attn_factor <= 1024.0,
          "the attention factor is " + Keys::text(r.attn_factor) + "; expected 0 to 1024");
  require(ordered(r.beta_fast, r.beta_slow), "beta_fast is " + Keys::text(r.beta_fast) + " and beta_slow " +
                                                 Keys::text(r.beta_slow) +
                                                 "; expected the former to be larger, both positive");
  require(ordered(r.high_freq_factor, r.low_freq_factor),
          "high_freq_factor is " + Keys::text(r.high_freq_factor) + " and low_freq_factor " +
              Keys::text(r.low_freq_factor) + "; expected the former to be larger, both positive");
  for (const std::vector<float>* factors : {&r.factors, &r.long_factors}) {
    require(factors->size() == static_cast<std::size_t>(c.rope_dims / 2) || (factors->empty() && !is_long),
            "there are " + std::to_string(factors->size()) + " factors; expected one for each of the " +
                std::to_string(c.rope_dims / 2) + " pairs of a head");
    for (const float f : *factors) {
      require(is_rope_factor(f), "a factor is " + Keys::text(f) + "; expected 1e-6 to 1e6");
    }
  }
  require(c.rope_dims > 2 || (r.scaling != RopeScaling::Ntk && r.scaling != RopeScaling::DynamicNtk),
          "NTK-aware scaling needs heads of more than one pair");
  c.ropes[0] = std::move(r);
  c.n_ctx_limit = context_limit(c, c.ropes[0]);
}

}  // namespace ringlm

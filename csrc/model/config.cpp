#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "gguf/blocks.h"
#include "model/architecture.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

constexpr std::int64_t kMaxDim = 1 << 24;      // far above any model; products of two stay inside 64 bits
constexpr std::int32_t kMaxHeadDim = 1 << 14;  // every thread holds a tile of keys and values as float32

struct Keys {
  const gguf::File& file;
  std::string arch;

  std::string full(const char* key) const { return arch + "." + key; }

  // A count that must be in [1, kMaxDim]. `fallback` < 0 makes the key required.
  std::int32_t count(const char* key, std::int64_t fallback = -1) const {
    const std::string name = full(key);
    if (const gguf::Value* v = file.find(name); v && v->type == gguf::ValueType::Array) {
      throw UnsupportedModelError(
          "'" + name + "' is an array of " + std::to_string(v->count) +
          " values (one per layer); only models whose layers all have the same shape are supported");
    }
    const auto found = file.get_uint(name);
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

  // 0 is how some files say that there is none.
  float scale(const char* key, double fallback) const {
    const double x = number(key, 0.0, -1e9, 1e9);
    return static_cast<float>(x == 0.0 ? fallback : x);
  }

  std::vector<bool> flags(const std::string& name, const gguf::Value& array) const {
    std::vector<bool> out;
    const bool numbers = gguf::with_number_type(array.element, [&]<typename T>(const T*) {
      for (std::uint64_t i = 0; i < array.count; ++i) {
        out.push_back(gguf::load<T>(array.bytes.data() + i * sizeof(T)) != T{});
      }
    });
    if (!numbers) throw FileFormatError("'" + name + "' is " + gguf::describe(array) + "; expected flags");
    return out;
  }

  static std::string text(double x) {
    std::ostringstream out;
    out << x;
    return out.str();
  }
};

constexpr const char* kRopeTensors[] = {"rope_freqs.weight", "rope_factors_short.weight",
                                        "rope_factors_long.weight"};

// One number for each pair, or nothing.
std::vector<float> rope_factors(const gguf::File& file, const std::string& name, std::int32_t rope_dims) {
  const gguf::Tensor* t = file.find_tensor(name);
  if (!t) return {};
  const auto pairs = static_cast<std::size_t>(rope_dims / 2);
  if (t->dims[0] != pairs || t->dims[1] != 1 || !can_dequantize(t->type)) {
    throw FileFormatError("tensor '" + name + "' should hold a number for each of the " +
                          std::to_string(pairs) + " pairs of a head");
  }
  std::vector<float> factors(pairs);
  dequantize(t->type, t->data, factors);
  if (std::ranges::any_of(factors, [](float f) { return !(f > 0.0f); })) {
    throw FileFormatError("tensor '" + name + "' holds a factor that is not positive");
  }
  return factors;
}

// A type that is not known must not be ignored: the model would run and answer nonsense beyond its first few
// thousand tokens.
Rope read_rope(const Keys& keys, const Config& c) {
  Rope rope;
  rope.base = keys.number("rope.freq_base", 10000.0, 1.0, 1e30);
  rope.original = keys.number("rope.scaling.original_context_length", c.n_ctx_train, 1.0, 1e9);
  rope.factors = rope_factors(keys.file, kRopeTensors[0], c.rope_dims);
  const double legacy = keys.number("rope.scale_linear", 1.0, 1.0, 1024.0);
  const double factor = keys.number("rope.scaling.factor", legacy, 1.0, 1024.0);
  std::vector<float> short_factors = rope_factors(keys.file, kRopeTensors[1], c.rope_dims);
  std::vector<float> long_factors = rope_factors(keys.file, kRopeTensors[2], c.rope_dims);
  if (short_factors.empty() != long_factors.empty()) {
    throw FileFormatError(std::string("tensor '") + kRopeTensors[short_factors.empty() ? 1 : 2] +
                          "' is missing; LongRoPE needs the factors for short and for long texts");
  }
  const std::string type_key = keys.full("rope.scaling.type");
  const std::string fallback = long_factors.empty() ? "linear" : "longrope";
  const std::string type(keys.file.get_string(type_key).value_or(fallback));
  if (type == "longrope") {
    if (long_factors.empty()) {
      throw FileFormatError("'" + type_key + "' is 'longrope', but tensor '" + kRopeTensors[2] +
                            "' is missing");
    }
    rope.scaling = RopeScaling::LongRope;
    rope.factor = std::max(1.0, c.n_ctx_train / rope.original);
    rope.attn_factor = keys.number("rope.scaling.attn_factor", 0.0, 0.0, 1024.0);
    rope.factors = std::move(short_factors);
    rope.long_factors = std::move(long_factors);
    return rope;
  }
  if (type == "none") return rope;
  if (type != "linear" && type != "yarn") {
    throw UnsupportedModelError("'" + type_key + "' is '" + type +
                                "'; supported are 'none', 'linear', 'yarn' and 'longrope'");
  }
  if (factor == 1.0) return rope;
  rope.factor = factor;
  if (type == "linear") {
    rope.scaling = RopeScaling::Linear;
    return rope;
  }
  rope.scaling = RopeScaling::Yarn;
  rope.beta_fast = keys.number("rope.scaling.yarn_beta_fast", 32.0, 0.0, 1e6);
  rope.beta_slow = keys.number("rope.scaling.yarn_beta_slow", 1.0, 0.0, 1e6);
  // The file's is a multiple of the formula's.
  const double attn_factor = keys.number("rope.scaling.attn_factor", 1.0, 1e-6, 1024.0) *
                             keys.number("rope.scaling.yarn_attn_factor", 1.0, 1e-6, 1024.0);
  if (attn_factor != 1.0) rope.attn_factor = attn_factor * (0.1 * std::log(factor) + 1.0);
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
  if (keys.file.get_uint(window_key).value_or(0) == 0) return std::vector<std::int32_t>(n, 0);
  std::vector<std::int32_t> windows(n, keys.count("attention.sliding_window"));
  const std::string pattern_key = keys.full("attention.sliding_window_pattern");
  const gguf::Value* pattern = keys.file.find(pattern_key);
  if (pattern && pattern->type == gguf::ValueType::Array) {
    const std::vector<bool> has = keys.flags(pattern_key, *pattern);
    if (has.size() != n) {
      throw FileFormatError("'" + pattern_key + "' has " + std::to_string(has.size()) + " values; the " +
                            std::to_string(n) + " layers need one each");
    }
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
  c.n_ff_expert = keys.count("expert_feed_forward_length", c.n_ff);
  if (keys.file.get_uint(keys.full("expert_shared_feed_forward_length")).value_or(0) != 0) {
    c.n_ff_shared = keys.count("expert_shared_feed_forward_length");
  }
  c.expert_weights_norm =
      keys.file.get_bool(keys.full("expert_weights_norm")).value_or(a.expert_weights_norm);
  if (const auto f = keys.file.get_uint(keys.full("expert_gating_func")).value_or(0); f > 1) {
    throw UnsupportedModelError("'" + keys.full("expert_gating_func") + "' is " + std::to_string(f) +
                                "; supported is 1, softmax");
  }
  if (const double x = keys.file.get_float(keys.full("expert_weights_scale")).value_or(0.0);
      x != 0.0 && x != 1.0) {
    throw UnsupportedModelError("'" + keys.full("expert_weights_scale") + "' is " + Keys::text(x) +
                                "; only 1 is supported");
  }
}

// The trained length times the scaling, unless the file's length is that already.
std::int64_t context_limit(const Config& c, const Rope& rope) {
  const bool scaled = rope.scaling != RopeScaling::None && rope.scaling != RopeScaling::LongRope;
  const double scaled_length = scaled ? rope.original * rope.factor : 0.0;
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
  c.ropes = {read_rope(keys, c)};
  if (a.context_is_scaled && !file.find(keys.full("rope.scaling.original_context_length"))) {
    c.ropes[0].original = c.n_ctx_train / c.ropes[0].factor;
  }
  c.n_ctx_limit = context_limit(c, c.ropes[0]);
  c.windows = read_windows(keys, a, c.n_layer);
  c.rope_of.assign(c.windows.size(), 0);
  for (std::size_t i = 0; a.rope_period > 0 && i < c.rope_of.size(); ++i) {
    if (static_cast<std::int32_t>(i) % a.rope_period == a.rope_period - 1) c.rope_of[i] = -1;
  }
  const double window_base = keys.number("rope.freq_base_swa", a.window_rope_base, 0.0, 1e30);
  if (window_base != 0.0) {
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
  const double width = c.n_layer == a.wide_head_layers ? c.n_embd / c.n_head : c.head_dim;
  c.attention_scale = keys.scale("attention.scale", 1.0 / std::sqrt(width));
  c.embedding_scale = keys.scale("embedding_scale", a.scaled_embedding ? std::sqrt(c.n_embd) : 1.0);
  c.residual_scale = keys.scale("residual_scale", 1.0);
  c.logit_scale = 1.0f / keys.scale("logit_scale", 1.0);
  c.attn_softcap = keys.scale("attn_logit_softcapping", 0.0);
  c.final_softcap = keys.scale("final_logit_softcapping", 0.0);
  if (c.attn_softcap < 0.0f || c.final_softcap < 0.0f) {
    throw FileFormatError("'" + keys.full("*_logit_softcapping") + "' is negative; expected a positive cap");
  }

  // Features that change the arithmetic and that nothing here computes.
  for (const char* key : {"attention.clamp_kqv", "attention.max_alibi_bias", "attention.output_scale",
                          "router_logit_softcapping", "attention.temperature_length",
                          "attention.key_length_mla", "attention.key_length_swa",
                          "attention.shared_kv_layers", "expert_group_count", "leading_dense_block_count"}) {
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
  require(r.base >= 1.0 && r.base <= 1e30, "base is " + Keys::text(r.base) + "; expected 1 to 1e30");
  require(r.factor >= 1.0 && r.factor <= 1024.0,
          "factor is " + Keys::text(r.factor) + "; expected 1 to 1024");
  require(r.original >= 1.0 && r.original <= 1e9,
          "the original length is " + Keys::text(r.original) + "; expected 1 to 1e9 tokens");
  require(r.attn_factor >= 0.0 && r.attn_factor <= 1024.0,
          "the attention factor is " + Keys::text(r.attn_factor) + "; expected 0 to 1024");
  require(r.beta_slow > 0.0 && r.beta_fast > r.beta_slow,
          "beta_fast is " + Keys::text(r.beta_fast) + " and beta_slow " + Keys::text(r.beta_slow) +
              "; expected the former to be larger, both positive");
  require(r.low_freq_factor > 0.0 && r.high_freq_factor > r.low_freq_factor,
          "high_freq_factor is " + Keys::text(r.high_freq_factor) + " and low_freq_factor " +
              Keys::text(r.low_freq_factor) + "; expected the former to be larger, both positive");
  const bool pairs_need = r.scaling == RopeScaling::LongRope;
  for (const std::vector<float>* factors : {&r.factors, &r.long_factors}) {
    require(factors->size() == static_cast<std::size_t>(c.rope_dims / 2) || (factors->empty() && !pairs_need),
            "there are " + std::to_string(factors->size()) + " factors; expected one for each of the " +
                std::to_string(c.rope_dims / 2) + " pairs of a head");
    require(std::ranges::all_of(*factors, [](float f) { return f > 0.0f; }), "a factor is not positive");
  }
  require(c.rope_dims > 2 || (r.scaling != RopeScaling::Ntk && r.scaling != RopeScaling::DynamicNtk),
          "NTK-aware scaling needs heads of more than one pair");
  c.ropes[0] = std::move(r);
  c.n_ctx_limit = context_limit(c, c.ropes[0]);
}

}  // namespace ringlm

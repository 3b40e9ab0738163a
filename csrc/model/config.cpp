#include "model/config.h"

#include <limits>
#include <sstream>
#include <string>

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

  static std::string text(double x) {
    std::ostringstream out;
    out << x;
    return out.str();
  }
};

// Linear scaling divides positions by a factor (arXiv:2306.15595). A type that is not known must not be
// ignored: the model would run and answer nonsense beyond its first few thousand tokens.
double rope_factor(const Keys& keys) {
  const std::string type_key = keys.full("rope.scaling.type");
  const std::string type(keys.file.get_string(type_key).value_or("linear"));
  if (type == "none") return 1.0;
  if (type != "linear") {
    throw UnsupportedModelError("'" + type_key + "' is '" + type + "'; supported are 'none' and 'linear'");
  }
  const double legacy = keys.number("rope.scale_linear", 1.0, 1.0, 1024.0);
  return keys.number("rope.scaling.factor", legacy, 1.0, 1024.0);
}

}  // namespace

Config read_config(const gguf::File& file) {
  const auto arch = file.get_string("general.architecture");
  if (!arch)
    throw FileFormatError(
        "key 'general.architecture' is missing: this GGUF file does not say what model it holds");
  if (*arch != "llama") {
    throw UnsupportedModelError("architecture '" + std::string(*arch) +
                                "' is not supported; supported is 'llama'");
  }
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

  c.rope_pairing = RopePairing::Interleaved;
  c.rope_dims = keys.count("rope.dimension_count", c.head_dim);
  if (c.rope_dims > c.head_dim || c.rope_dims % 2 != 0) {
    throw FileFormatError("'" + keys.full("rope.dimension_count") + "' is " + std::to_string(c.rope_dims) +
                          "; expected an even number up to the head size " + std::to_string(c.head_dim));
  }
  c.rope_base = keys.number("rope.freq_base", 10000.0, 1.0, 1e30);
  c.rope_factor = rope_factor(keys);

  const std::int32_t window = file.get_uint(keys.full("attention.sliding_window")).value_or(0) == 0
                                  ? 0
                                  : keys.count("attention.sliding_window");
  c.windows.assign(static_cast<std::size_t>(c.n_layer), window);

  const std::string eps_key = keys.full("attention.layer_norm_rms_epsilon");
  if (!file.find(eps_key)) throw FileFormatError("key '" + eps_key + "' is missing");
  c.norm_eps = static_cast<float>(keys.number("attention.layer_norm_rms_epsilon", 0.0, 1e-30, 1.0));

  // Features that change the arithmetic and that nothing here computes.
  if (const auto n = file.get_uint(keys.full("expert_count")).value_or(0); n != 0) {
    throw UnsupportedModelError("'" + keys.full("expert_count") + "' is " + std::to_string(n) +
                                "; models with it are not supported");
  }
  if (const std::string key = keys.full("attention.sliding_window_pattern"); file.find(key)) {
    throw UnsupportedModelError(
        "'" + key +
        "' is set; windows that differ between layers are supported only when given by "
        "the caller");
  }
  for (const char* key : {"attention.scale", "attn_logit_softcapping", "final_logit_softcapping",
                          "logit_scale", "embedding_scale", "residual_scale"}) {
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

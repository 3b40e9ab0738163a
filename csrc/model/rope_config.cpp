#include "model/rope_config.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gguf/blocks.h"
#include "model/config.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

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

void read_yarn(const Keys& keys, const Architecture& a, double factor, double attn_factor, Rope& rope) {
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
}

}  // namespace

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
  const std::string who = "RoPE scaling of type '" + type + "'";
  if (type == "longrope") {
    if (long_factors.empty()) {
      throw FileFormatError("'" + type_key + "' is 'longrope', but tensor '" + kRopeTensors[2] +
                            "' is missing");
    }
    keys.require("rope.scaling.original_context_length", who);
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
  const bool says_so = keys.file.find(type_key) != nullptr && type != "none";
  if (says_so && !keys.file.find(keys.full("rope.scale_linear"))) keys.require("rope.scaling.factor", who);
  if (type != "yarn" || factor == 1.0) {
    rope.attn_factor = attn_factor;
    if (type == "none" || factor == 1.0) return rope;
    rope.scaling = RopeScaling::Linear;
    rope.factor = factor;
    return rope;
  }
  read_yarn(keys, a, factor, attn_factor, rope);
  return rope;
}

// The trained length times the scaling, unless the file's length is that already.
std::int64_t context_limit(const Config& c, const Rope& rope) {
  const double scaled_length = rope.scaling == RopeScaling::None ? 0.0 : rope.original * rope.factor;
  return std::max<std::int64_t>(c.n_ctx_train, static_cast<std::int64_t>(scaled_length));
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

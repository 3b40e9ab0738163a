#include "model/architecture.h"

#include <algorithm>

#include "ringlm/error.h"

namespace ringlm {
namespace {

constexpr auto kInterleaved = RopePairing::Interleaved;
constexpr auto kHalves = RopePairing::Halves;

constexpr Architecture kArchitectures[] = {
    {.name = "llama", .pairing = kInterleaved, .experts = true, .expert_weights_norm = true},
    {.name = "qwen", .pairing = kHalves, .qkv_bias = true, .ff_matrices = 2},
    {.name = "qwen2", .pairing = kHalves, .qkv_bias = true},
    {.name = "qwen2moe",
     .pairing = kHalves,
     .qkv_bias = true,
     .experts = true,
     .narrow_experts = true,
     .shared_expert = true},
    {.name = "qwen3", .pairing = kHalves, .qk_norm = QkNorm::Head},
    {.name = "qwen3moe",
     .pairing = kHalves,
     .qk_norm = QkNorm::Head,
     .experts = true,
     .expert_weights_norm = true,
     .narrow_experts = true},
    {.name = "phi3", .pairing = kHalves},
    {.name = "gemma", .pairing = kHalves, .activation = Activation::Gelu, .scaled_embedding = true},
    {.name = "gemma2",
     .pairing = kHalves,
     .norms = Norms::Both,
     .activation = Activation::Gelu,
     .scaled_embedding = true,
     .window = 4096,
     .window_period = 2,
     .attn_softcap = 50.0,
     .final_softcap = 30.0,
     .wide_head_layers = 46},
    {.name = "gemma3",
     .pairing = kHalves,
     .norms = Norms::Both,
     .qk_norm = QkNorm::Head,
     .activation = Activation::Gelu,
     .required_key = "attention.sliding_window",
     .scaled_embedding = true,
     .window_period = 6,
     .window_rope_base = 10000.0,
     .wide_head_layers = 62,
     .context_is_scaled = true},
    {.name = "granite", .pairing = kInterleaved, .required_key = "logit_scale", .finetuned_means_rope = true},
    {.name = "olmo2",
     .pairing = kHalves,
     .norms = Norms::After,
     .qk_norm = QkNorm::Full,
     .window_period = 4,
     .window_rope_plain = true},
    {.name = "smollm3", .pairing = kInterleaved, .rope_period = 4},
};

}  // namespace

const Architecture& architecture(std::string_view name) {
  const auto* found = std::ranges::find(kArchitectures, name, &Architecture::name);
  if (found != std::end(kArchitectures)) return *found;
  std::string supported;
  for (const Architecture& a : kArchitectures) {
    supported += (supported.empty() ? "'" : ", '") + std::string(a.name) + "'";
  }
  throw UnsupportedModelError("architecture '" + std::string(name) + "' is not supported; supported are " +
                              supported);
}

}  // namespace ringlm

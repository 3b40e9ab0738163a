// What an architecture is, as data. Everything that the operations need to know of a model apart from
// its weights. Filled from GGUF metadata (model/config.cpp); the key of each field stands beside it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ringlm {

// Which elements of a head turn together. GGUF files of the llama architecture store Q and K permuted
// for Interleaved; others keep the Hugging Face order, Halves.
enum class RopePairing {
  Interleaved,  // (x[2i], x[2i+1])
  Halves,       // (x[i], x[i + n/2])
};

struct Config {
  std::string architecture;  // general.architecture
  std::string name;          // general.name, or empty

  std::int32_t n_vocab = 0;      // rows of token_embd.weight
  std::int32_t n_embd = 0;       // {arch}.embedding_length
  std::int32_t n_layer = 0;      // {arch}.block_count
  std::int32_t n_head = 0;       // {arch}.attention.head_count: query heads
  std::int32_t n_head_kv = 0;    // {arch}.attention.head_count_kv, default n_head
  std::int32_t head_dim = 0;     // {arch}.attention.key_length, default n_embd / n_head
  std::int32_t n_ff = 0;         // {arch}.feed_forward_length
  std::int32_t n_ctx_train = 0;  // {arch}.context_length

  RopePairing rope_pairing = RopePairing::Interleaved;
  std::int32_t rope_dims =
      0;  // {arch}.rope.dimension_count, default head_dim; the rest of a head does not turn
  double rope_base = 10000.0;  // {arch}.rope.freq_base
  double rope_factor =
      1.0;  // {arch}.rope.scaling.factor where the scaling is linear: positions are divided by it

  std::vector<std::int32_t> windows;  // [n_layer] {arch}.attention.sliding_window: a query sees that many of
                                      // the last positions, its own included; 0: all

  float norm_eps = 1e-5f;  // {arch}.attention.layer_norm_rms_epsilon

  std::int32_t group() const { return n_head / n_head_kv; }     // query heads per KV head
  std::int32_t q_dim() const { return n_head * head_dim; }      // width of the query projection
  std::int32_t kv_dim() const { return n_head_kv * head_dim; }  // width of the key and value projections
};

}  // namespace ringlm

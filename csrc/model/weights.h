// The tensors of a model, bound by name and checked against the Config. Matrices stay where the file
// is mapped; vectors (norms, biases) are small and are copied to float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gguf/file.h"
#include "ringlm/config.h"

namespace ringlm {

// A weight matrix in GGUF's layout: `rows` outputs of `cols` inputs, each row a run of blocks.
struct Matrix {
  gguf::DType type = gguf::DType::F32;
  std::int32_t rows = 0;
  std::int32_t cols = 0;
  std::size_t row_bytes = 0;
  std::span<const std::byte> data;  // [rows * row_bytes]
  std::size_t index = 0;            // among the model's matrices: where a backend keeps its own copy

  const std::byte* row(std::int64_t r) const { return data.data() + static_cast<std::size_t>(r) * row_bytes; }
};

using Vector = std::vector<float>;  // empty where the model has none

struct FeedForward {
  Matrix gate, up;            // [n_ff, n_embd]
  Vector gate_bias, up_bias;  // [n_ff] or empty
  Matrix down;                // [n_embd, n_ff]
  Vector down_bias;           // [n_embd] or empty
};

// Where a file has several of these matrices in one tensor (attn_qkv, gate and up in ffn_up, all experts),
// each is a slice of it.
struct LayerWeights {
  Vector attn_norm;                  // [n_embd], or empty: no norm there (Norms::After)
  Matrix q, k, v;                    // [q_dim, n_embd], [kv_dim, n_embd] twice
  Vector q_bias, k_bias, v_bias;     // [q_dim], [kv_dim] twice, or empty
  Vector q_norm, k_norm;             // [head_dim] both, or [q_dim] and [kv_dim], or empty (Config::qk_norm)
  Matrix out;                        // [n_embd, q_dim]
  Vector out_bias;                   // [n_embd] or empty
  Vector attn_post_norm;             // [n_embd] or empty
  Vector ffn_norm;                   // [n_embd] or empty
  FeedForward ff;                    // of layers without experts
  Matrix router;                     // [n_expert, n_embd]
  std::vector<FeedForward> experts;  // [n_expert] of n_ff_expert, then the shared one of n_ff_shared, if any
  Vector shared_gate;                // [n_embd]: the shared expert's weight is sigmoid of the product with it
  Vector ffn_post_norm;              // [n_embd] or empty
  bool keys_have_offset = false;     // all keys contain the turned bias: see centred() in ops/ops.h

  // Calls f with every feed-forward network.
  template <class F>
  void for_each_network(F f) const {
    if (experts.empty()) return f(ff);
    for (const FeedForward& expert : experts) f(expert);
  }

  // Bytes of the vectors, which are float32 here whatever the file has.
  std::size_t vector_bytes() const {
    std::size_t floats = 0;
    for (const Vector* vector : {&attn_norm, &q_bias, &k_bias, &v_bias, &q_norm, &k_norm, &out_bias,
                                 &attn_post_norm, &ffn_norm, &shared_gate, &ffn_post_norm}) {
      floats += vector->size();
    }
    for_each_network(
        [&](const FeedForward& n) { floats += n.gate_bias.size() + n.up_bias.size() + n.down_bias.size(); });
    return floats * sizeof(float);
  }
};

struct Weights {
  Matrix token_embd;                 // [n_vocab, n_embd]
  std::vector<LayerWeights> layers;  // [n_layer]
  Vector output_norm;                // [n_embd]
  Matrix head;                       // [n_vocab, n_embd]; the same data as token_embd where they are tied
  bool tied = false;
  std::size_t n_matrices = 0;
  std::size_t nbytes = 0;  // of all bound tensors, as they lie in the file

  // Calls f with every matrix; tied ones once.
  template <class F>
  void for_each_matrix(F f) const {
    f(token_embd);
    for (const LayerWeights& l : layers) {
      for (const Matrix* m : {&l.q, &l.k, &l.v, &l.out}) f(*m);
      if (l.router.rows > 0) f(l.router);
      l.for_each_network([&](const FeedForward& n) {
        for (const Matrix* m : {&n.gate, &n.up, &n.down}) f(*m);
      });
    }
    if (!tied) f(head);
  }
};

// Throws UnsupportedModelError for a tensor that is missing, has a type without arithmetic here, or that
// nothing would use; FileFormatError for a shape that contradicts the Config. The result points into `file`.
Weights bind_weights(const gguf::File& file, const Config& config);

}  // namespace ringlm

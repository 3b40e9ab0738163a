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

struct LayerWeights {
  Vector attn_norm;               // [n_embd]
  Matrix q, k, v;                 // [q_dim, n_embd], [kv_dim, n_embd] twice
  Vector q_bias, k_bias, v_bias;  // [q_dim], [kv_dim] twice, or empty
  Matrix out;                     // [n_embd, q_dim]
  Vector out_bias;                // [n_embd] or empty
  Vector ffn_norm;                // [n_embd]
  Matrix gate, up;                // [n_ff, n_embd]
  Vector gate_bias, up_bias;      // [n_ff] or empty
  Matrix down;                    // [n_embd, n_ff]
  Vector down_bias;               // [n_embd] or empty

  // Bytes of the vectors, which are float32 here whatever the file has.
  std::size_t vector_bytes() const {
    std::size_t floats = 0;
    for (const Vector* vector :
         {&attn_norm, &q_bias, &k_bias, &v_bias, &out_bias, &ffn_norm, &gate_bias, &up_bias, &down_bias}) {
      floats += vector->size();
    }
    return floats * sizeof(float);
  }
};

struct Weights {
  Matrix token_embd;                 // [n_vocab, n_embd]
  std::vector<LayerWeights> layers;  // [n_layer]
  Vector output_norm;                // [n_embd]
  Matrix head;                       // [n_vocab, n_embd]; the same data as token_embd where they are tied
  Vector rope_freq_factors;          // [rope_dims / 2]: each frequency is divided by it (Llama 3.1), or empty
  bool tied = false;
  std::size_t n_matrices = 0;
  std::size_t nbytes = 0;  // of all bound tensors, as they lie in the file

  // Calls f with every matrix; tied ones once.
  template <class F>
  void for_each_matrix(F f) const {
    f(token_embd);
    for (const LayerWeights& l : layers) {
      for (const Matrix* m : {&l.q, &l.k, &l.v, &l.out, &l.gate, &l.up, &l.down}) f(*m);
    }
    if (!tied) f(head);
  }
};

// Throws UnsupportedModelError for a tensor that is missing, has a type without arithmetic here, or that
// nothing would use; FileFormatError for a shape that contradicts the Config. The result points into `file`.
Weights bind_weights(const gguf::File& file, const Config& config);

}  // namespace ringlm

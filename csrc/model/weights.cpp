#include "model/weights.h"

#include <algorithm>
#include <string>
#include <unordered_set>

#include "gguf/blocks.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::string shape_text(std::uint64_t cols, std::uint64_t rows) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

class Binder {
 public:
  explicit Binder(const gguf::File& file) : file_(file) {}

  Matrix matrix(const std::string& name, std::int32_t rows, std::int32_t cols) {
    const gguf::Tensor& t = required(name);
    check_shape(t, rows, cols);
    const gguf::TypeTraits& type = gguf::traits(t.type);
    Matrix m;
    m.type = t.type;
    m.rows = rows;
    m.cols = cols;
    m.row_bytes = static_cast<std::size_t>(cols) / type.block_size * type.block_bytes;
    m.data = t.data;
    m.index = n_matrices_++;
    return m;
  }

  Vector vector(const std::string& name, std::int32_t n) {
    const gguf::Tensor& t = required(name);
    check_shape(t, 1, n);
    Vector v(static_cast<std::size_t>(n));
    dequantize(t.type, t.data, v);
    return v;
  }

  Vector optional_vector(const std::string& name, std::int32_t n) {
    return file_.find_tensor(name) ? vector(name, n) : Vector{};
  }

  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }
  std::size_t nbytes() const { return nbytes_; }
  std::size_t n_matrices() const { return n_matrices_; }

  // A tensor that nothing reads means that the model computes something that ringlm would leave out.
  void check_all_used() const {
    for (const gguf::Tensor& t : file_.tensors()) {
      if (used_.count(&t) || t.name.ends_with(".attn_rot_embd.freqs"))
        continue;  // old files carry RoPE's own tables
      throw UnsupportedModelError("tensor '" + std::string(t.name) +
                                  "' belongs to nothing in the architecture as it is supported here; "
                                  "running without it would give wrong results");
    }
  }

 private:
  const gguf::Tensor& required(const std::string& name) {
    const gguf::Tensor* t = file_.find_tensor(name);
    if (!t) throw UnsupportedModelError("tensor '" + name + "' is missing; the architecture needs it");
    if (!can_dequantize(t->type)) {
      throw UnsupportedModelError("tensor '" + name + "' has type " +
                                  std::string(gguf::traits(t->type).name) + "; supported are " +
                                  dequantizable_types());
    }
    if (used_.insert(t).second) nbytes_ += t->data.size();
    return *t;
  }

  static void check_shape(const gguf::Tensor& t, std::int32_t rows, std::int32_t cols) {
    const bool fits = t.dims[0] == static_cast<std::uint64_t>(cols) &&
                      t.dims[1] == static_cast<std::uint64_t>(rows) && t.dims[2] == 1 && t.dims[3] == 1;
    if (fits) return;
    std::string found = shape_text(t.dims[0], t.dims[1]);
    if (t.n_dims > 2) found += " and more dimensions";
    throw FileFormatError("tensor '" + std::string(t.name) + "' has shape " + found +
                          "; by the file's own metadata it should be " +
                          shape_text(static_cast<std::uint64_t>(cols), static_cast<std::uint64_t>(rows)));
  }

  const gguf::File& file_;
  std::unordered_set<const gguf::Tensor*> used_;
  std::size_t nbytes_ = 0;
  std::size_t n_matrices_ = 0;
};

LayerWeights bind_layer(Binder& b, const Config& c, std::int32_t layer) {
  const std::string p = "blk." + std::to_string(layer) + ".";
  LayerWeights w;
  w.attn_norm = b.vector(p + "attn_norm.weight", c.n_embd);
  w.q = b.matrix(p + "attn_q.weight", c.q_dim(), c.n_embd);
  w.k = b.matrix(p + "attn_k.weight", c.kv_dim(), c.n_embd);
  w.v = b.matrix(p + "attn_v.weight", c.kv_dim(), c.n_embd);
  w.q_bias = b.optional_vector(p + "attn_q.bias", c.q_dim());
  w.k_bias = b.optional_vector(p + "attn_k.bias", c.kv_dim());
  w.v_bias = b.optional_vector(p + "attn_v.bias", c.kv_dim());
  w.out = b.matrix(p + "attn_output.weight", c.n_embd, c.q_dim());
  w.out_bias = b.optional_vector(p + "attn_output.bias", c.n_embd);
  w.ffn_norm = b.vector(p + "ffn_norm.weight", c.n_embd);
  w.gate = b.matrix(p + "ffn_gate.weight", c.n_ff, c.n_embd);
  w.up = b.matrix(p + "ffn_up.weight", c.n_ff, c.n_embd);
  w.gate_bias = b.optional_vector(p + "ffn_gate.bias", c.n_ff);
  w.up_bias = b.optional_vector(p + "ffn_up.bias", c.n_ff);
  w.down = b.matrix(p + "ffn_down.weight", c.n_embd, c.n_ff);
  w.down_bias = b.optional_vector(p + "ffn_down.bias", c.n_embd);
  return w;
}

}  // namespace

Weights bind_weights(const gguf::File& file, const Config& c) {
  // Every layer has nine tensors; a count that the file cannot hold must not make us allocate.
  if (static_cast<std::size_t>(c.n_layer) > file.tensors().size()) {
    throw FileFormatError("'" + c.architecture + ".block_count' is " + std::to_string(c.n_layer) +
                          ", but the file holds only " + std::to_string(file.tensors().size()) + " tensors");
  }
  Binder b(file);
  Weights w;
  w.token_embd = b.matrix("token_embd.weight", c.n_vocab, c.n_embd);
  for (std::int32_t i = 0; i < c.n_layer; ++i) w.layers.push_back(bind_layer(b, c, i));
  w.output_norm = b.vector("output_norm.weight", c.n_embd);
  w.tied = !b.has("output.weight");
  w.head = w.tied ? w.token_embd : b.matrix("output.weight", c.n_vocab, c.n_embd);
  w.rope_freq_factors = b.optional_vector("rope_freqs.weight", c.rope_dims / 2);
  if (std::any_of(w.rope_freq_factors.begin(), w.rope_freq_factors.end(),
                  [](float f) { return !(f > 0.0f); })) {
    throw FileFormatError("tensor 'rope_freqs.weight' holds a factor that is not positive");
  }
  b.check_all_used();
  w.nbytes = b.nbytes();
  w.n_matrices = b.n_matrices();
  return w;
}

}  // namespace ringlm

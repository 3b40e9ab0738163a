#include "model/weights.h"

#include <initializer_list>
#include <numeric>
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
    return slice(t, 0, rows, cols);
  }

  // Matrices that lie one below the other in one tensor.
  std::vector<Matrix> stacked(const std::string& name, std::initializer_list<std::int32_t> rows,
                              std::int32_t cols) {
    const gguf::Tensor& t = required(name);
    check_shape(t, std::accumulate(rows.begin(), rows.end(), 0), cols);
    std::vector<Matrix> parts;
    std::int64_t first = 0;
    for (const std::int32_t n : rows) {
      parts.push_back(slice(t, first, n, cols));
      first += n;
    }
    return parts;
  }

  // Matrix i of a tensor [n, rows, cols].
  Matrix expert_of(const std::string& name, std::int32_t i, std::int32_t n, std::int32_t rows,
                   std::int32_t cols) {
    const gguf::Tensor& t = required(name);
    check_shape(t, rows, cols, n);
    return slice(t, std::int64_t{i} * rows, rows, cols);
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
  bool has_rows(const std::string& name, std::int32_t rows) const {
    const gguf::Tensor* t = file_.find_tensor(name);
    return t && t->dims[1] == static_cast<std::uint64_t>(rows);
  }
  std::size_t nbytes() const { return nbytes_; }
  std::size_t n_matrices() const { return n_matrices_; }

  // A tensor that nothing reads means that the model computes something that ringlm would leave out.
  void check_all_used() const {
    for (const gguf::Tensor& t : file_.tensors()) {
      // Old files carry RoPE's own tables; its factors are in the Config.
      const bool rope = t.name == "rope_freqs.weight" || t.name == "rope_factors_short.weight" ||
                        t.name == "rope_factors_long.weight" || t.name.ends_with(".attn_rot_embd.freqs");
      if (used_.count(&t) || rope) {
        continue;
      }
      throw UnsupportedModelError("tensor '" + std::string(t.name) +
                                  "' belongs to nothing in the architecture as it is supported here; "
                                  "running without it would give wrong results");
    }
  }

 private:
  Matrix slice(const gguf::Tensor& t, std::int64_t first, std::int32_t rows, std::int32_t cols) {
    const gguf::TypeTraits& type = gguf::traits(t.type);
    Matrix m;
    m.type = t.type;
    m.rows = rows;
    m.cols = cols;
    m.row_bytes = static_cast<std::size_t>(cols) / type.block_size * type.block_bytes;
    m.data = t.data.subspan(static_cast<std::size_t>(first) * m.row_bytes,
                            static_cast<std::size_t>(rows) * m.row_bytes);
    m.index = n_matrices_++;
    return m;
  }

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

  static void check_shape(const gguf::Tensor& t, std::int32_t rows, std::int32_t cols, std::int32_t n = 1) {
    const auto u64 = [](std::int32_t i) { return static_cast<std::uint64_t>(i); };
    if (t.dims[0] == u64(cols) && t.dims[1] == u64(rows) && t.dims[2] == u64(n) && t.dims[3] == 1) return;
    std::string found = shape_text(t.dims[0], t.dims[1]);
    if (t.n_dims > 2) found += " times " + std::to_string(t.dims[2]);
    if (t.n_dims > 3) found += " and more dimensions";
    throw FileFormatError("tensor '" + std::string(t.name) + "' has shape " + found +
                          "; by the file's own metadata it should be " + shape_text(u64(cols), u64(rows)) +
                          (n > 1 ? " times " + std::to_string(n) : ""));
  }

  const gguf::File& file_;
  std::unordered_set<const gguf::Tensor*> used_;
  std::size_t nbytes_ = 0;
  std::size_t n_matrices_ = 0;
};

void bind_attention(Binder& b, const Config& c, const std::string& p, LayerWeights& w) {
  const auto part = [](const Vector& all, std::int32_t first, std::int32_t n) {
    return all.empty() ? Vector{} : Vector(all.begin() + first, all.begin() + first + n);
  };
  const std::int32_t q = c.q_dim(), kv = c.kv_dim();
  if (b.has(p + "attn_qkv.weight")) {
    const std::vector<Matrix> qkv = b.stacked(p + "attn_qkv.weight", {q, kv, kv}, c.n_embd);
    const Vector bias = b.optional_vector(p + "attn_qkv.bias", q + 2 * kv);
    w.q = qkv[0], w.k = qkv[1], w.v = qkv[2];
    w.q_bias = part(bias, 0, q), w.k_bias = part(bias, q, kv), w.v_bias = part(bias, q + kv, kv);
  } else {
    w.q = b.matrix(p + "attn_q.weight", q, c.n_embd);
    w.k = b.matrix(p + "attn_k.weight", kv, c.n_embd);
    w.v = b.matrix(p + "attn_v.weight", kv, c.n_embd);
    w.q_bias = b.optional_vector(p + "attn_q.bias", q);
    w.k_bias = b.optional_vector(p + "attn_k.bias", kv);
    w.v_bias = b.optional_vector(p + "attn_v.bias", kv);
  }
  if (c.qkv_bias && (w.q_bias.empty() || w.k_bias.empty() || w.v_bias.empty())) {
    throw UnsupportedModelError("a bias of Q, K or V is missing in '" + p +
                                "*'; the architecture needs all of them");
  }
  if (c.qk_norm != QkNorm::None) {
    const bool full = c.qk_norm == QkNorm::Full;
    w.q_norm = b.vector(p + "attn_q_norm.weight", full ? q : c.head_dim);
    w.k_norm = b.vector(p + "attn_k_norm.weight", full ? kv : c.head_dim);
  }
  w.out = b.matrix(p + "attn_output.weight", c.n_embd, q);
  w.out_bias = b.optional_vector(p + "attn_output.bias", c.n_embd);
}

// `suffix` tells the shared expert's tensors from the others.
FeedForward bind_network(Binder& b, const Config& c, const std::string& p, const std::string& suffix,
                         std::int32_t n_ff) {
  FeedForward n;
  const auto name = [&](const char* what, const char* part) { return p + what + suffix + part; };
  const std::string up = name("ffn_up", ".weight");
  if (b.has(name("ffn_gate", ".weight")) || !b.has(up) || b.has_rows(up, n_ff)) {
    n.gate = b.matrix(name("ffn_gate", ".weight"), n_ff, c.n_embd);
    n.up = b.matrix(up, n_ff, c.n_embd);
    n.gate_bias = b.optional_vector(name("ffn_gate", ".bias"), n_ff);
    n.up_bias = b.optional_vector(name("ffn_up", ".bias"), n_ff);
  } else {
    const std::vector<Matrix> both = b.stacked(up, {n_ff, n_ff}, c.n_embd);
    n.gate = both[0], n.up = both[1];
  }
  n.down = b.matrix(name("ffn_down", ".weight"), c.n_embd, n_ff);
  n.down_bias = b.optional_vector(name("ffn_down", ".bias"), c.n_embd);
  return n;
}

// A layer without a router has no experts, also in a model that has some.
void bind_feed_forward(Binder& b, const Config& c, const std::string& p, LayerWeights& w) {
  if (c.n_expert == 0 || (!b.has(p + "ffn_gate_inp.weight") && !b.has(p + "ffn_gate_exps.weight"))) {
    w.ff = bind_network(b, c, p, "", c.n_ff);
    return;
  }
  if (b.has(p + "ffn_gate.0.weight")) {
    throw UnsupportedModelError("tensor '" + p +
                                "ffn_gate.0.weight' is of a layout that is no longer made, "
                                "with a tensor for each expert: convert the model again");
  }
  w.router = b.matrix(p + "ffn_gate_inp.weight", c.n_expert, c.n_embd);
  for (std::int32_t i = 0; i < c.n_expert; ++i) {
    FeedForward& n = w.experts.emplace_back();
    n.gate = b.expert_of(p + "ffn_gate_exps.weight", i, c.n_expert, c.n_ff_expert, c.n_embd);
    n.up = b.expert_of(p + "ffn_up_exps.weight", i, c.n_expert, c.n_ff_expert, c.n_embd);
    n.down = b.expert_of(p + "ffn_down_exps.weight", i, c.n_expert, c.n_embd, c.n_ff_expert);
  }
  if (c.n_ff_shared == 0) return;
  w.experts.push_back(bind_network(b, c, p, "_shexp", c.n_ff_shared));
  w.shared_gate = b.vector(p + "ffn_gate_inp_shexp.weight", c.n_embd);
}

LayerWeights bind_layer(Binder& b, const Config& c, std::int32_t layer) {
  const std::string p = "blk." + std::to_string(layer) + ".";
  LayerWeights w;
  if (c.norms != Norms::After) {
    w.attn_norm = b.vector(p + "attn_norm.weight", c.n_embd);
    w.ffn_norm = b.vector(p + "ffn_norm.weight", c.n_embd);
  }
  if (c.norms != Norms::Before) {
    w.attn_post_norm = b.vector(p + "post_attention_norm.weight", c.n_embd);
    w.ffn_post_norm = b.vector(p + "post_ffw_norm.weight", c.n_embd);
  }
  bind_attention(b, c, p, w);
  bind_feed_forward(b, c, p, w);
  w.keys_have_offset =
      !w.k_bias.empty() && w.k_norm.empty() && c.rope_of[static_cast<std::size_t>(layer)] >= 0;
  return w;
}

}  // namespace

Weights bind_weights(const gguf::File& file, const Config& c) {
  // Every layer has some tensors; a count that the file cannot hold must not make us allocate.
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
  b.check_all_used();
  w.nbytes = b.nbytes();
  w.n_matrices = b.n_matrices();
  return w;
}

}  // namespace ringlm

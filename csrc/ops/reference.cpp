#include "ops/reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gguf/blocks.h"
#include "model/rope.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Row m of a buffer [M, width].
std::span<float> row_of(std::span<float> buffer, std::size_t m, std::int64_t width) {
  return buffer.subspan(m * size(width), size(width));
}

double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

// y_i = w_i x_i / sqrt(mean(x^2) + eps)   (arXiv:1910.07467)
void rms_norm(std::span<const float> x, const Vector& w, float eps, std::span<float> y) {
  const double mean_square = dot(x, x) / static_cast<double>(x.size());
  const double scale = 1.0 / std::sqrt(mean_square + static_cast<double>(eps));
  for (std::size_t i = 0; i < x.size(); ++i) y[i] = static_cast<float>(w[i] * (x[i] * scale));
}

// Every row of a step: y = W x + bias, or y += W x + bias.
enum class Into { Replace, Add };

void matmul(const Matrix& w, const Vector& bias, std::span<float> x, std::span<float> y, std::size_t m_rows,
            Into into) {
  std::vector<float> weights(size(w.cols));
  for (std::int32_t r = 0; r < w.rows; ++r) {
    dequantize(w.type, {w.row(r), w.row_bytes}, weights);
    for (std::size_t m = 0; m < m_rows; ++m) {
      const double sum = dot(weights, row_of(x, m, w.cols)) + (bias.empty() ? 0.0 : bias[size(r)]);
      float& out = y[m * size(w.rows) + size(r)];
      out = static_cast<float>(into == Into::Add ? out + sum : sum);
    }
  }
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }

class ReferenceOps final : public Ops {
 public:
  const char* name() const override { return "reference"; }
  int n_threads() const override { return 1; }
  std::size_t tile_floats(const Config&, std::int64_t) const override { return 0; }

  void embed(const Config& c, const Weights& w, const Step& s) override {
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      dequantize(w.token_embd.type, {w.token_embd.row(s.rows[m].token), w.token_embd.row_bytes},
                 row_of(s.a.x, m, c.n_embd));
    }
  }

  void norm_qkv(const Config& c, const LayerWeights& w, const Step& s) override {
    const std::size_t M = s.rows.size();
    for (std::size_t m = 0; m < M; ++m) {
      rms_norm(row_of(s.a.x, m, c.n_embd), w.attn_norm, c.norm_eps, row_of(s.a.normed, m, c.n_embd));
    }
    matmul(w.q, w.q_bias, s.a.normed, s.a.q, M, Into::Replace);
    matmul(w.k, w.k_bias, s.a.normed, s.a.k, M, Into::Replace);
    matmul(w.v, w.v_bias, s.a.normed, s.a.v, M, Into::Replace);
  }

  void rope_append(const Config& c, std::int32_t layer, const Step& s) override {
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      const std::span<float> table = row_of(s.a.rope, m, c.rope_dims);
      const std::span<float> q = row_of(s.a.q, m, c.q_dim());
      const std::span<float> k = row_of(s.a.k, m, c.kv_dim());
      const std::span<float> v = row_of(s.a.v, m, c.kv_dim());
      for (std::int32_t h = 0; h < c.n_head; ++h)
        rope_apply(row_of(q, size(h), c.head_dim), table, c.rope_pairing);
      const kv::Layout& l = s.rows[m].kv->layout();
      const std::size_t slot = size(s.rows[m].position);
      for (std::int32_t h = 0; h < c.n_head_kv; ++h) {
        rope_apply(row_of(k, size(h), c.head_dim), table, c.rope_pairing);
        kv::store_row(l.k_format, row_of(k, size(h), c.head_dim).data(),
                      s.rows[m].kv->k(layer, h) + slot * l.k_row_bytes(), c.head_dim);
        kv::store_row(l.v_format, row_of(v, size(h), c.head_dim).data(),
                      s.rows[m].kv->v(layer, h) + slot * l.v_row_bytes(), c.head_dim);
      }
    }
  }

  // Grouped-query attention (arXiv:2305.13245): query head h reads KV head h / group.
  void attend(const Config& c, std::int32_t layer, const Step& s) override {
    const double scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    std::vector<float> row(size(c.head_dim));
    std::vector<double> score, sum(size(c.head_dim));
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      const kv::Layout& l = s.rows[m].kv->layout();
      const std::size_t visible = size(s.rows[m].position + 1);
      for (std::int32_t h = 0; h < c.n_head; ++h) {
        const std::span<float> q = row_of(row_of(s.a.q, m, c.q_dim()), size(h), c.head_dim);
        const std::byte* k = s.rows[m].kv->k(layer, h / c.group());
        const std::byte* v = s.rows[m].kv->v(layer, h / c.group());

        score.resize(visible);
        for (std::size_t t = 0; t < visible; ++t) {
          kv::load_row(l.k_format, k + t * l.k_row_bytes(), row.data(), c.head_dim);
          score[t] = dot(q, row) * scale;
        }
        const double largest = *std::max_element(score.begin(), score.end());
        double total = 0.0;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (std::size_t t = 0; t < visible; ++t) {
          const double p = std::exp(score[t] - largest);
          total += p;
          kv::load_row(l.v_format, v + t * l.v_row_bytes(), row.data(), c.head_dim);
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += p * row[i];
        }
        const std::span<float> out = row_of(row_of(s.a.att, m, c.q_dim()), size(h), c.head_dim);
        for (std::size_t i = 0; i < sum.size(); ++i) out[i] = static_cast<float>(sum[i] / total);
      }
    }
  }

  void out_residual(const Config&, const LayerWeights& w, const Step& s) override {
    matmul(w.out, w.out_bias, s.a.att, s.a.x, s.rows.size(), Into::Add);
  }

  // SwiGLU (arXiv:2002.05202)
  void norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) override {
    const std::size_t M = s.rows.size();
    for (std::size_t m = 0; m < M; ++m) {
      rms_norm(row_of(s.a.x, m, c.n_embd), w.ffn_norm, c.norm_eps, row_of(s.a.normed, m, c.n_embd));
    }
    matmul(w.gate, w.gate_bias, s.a.normed, s.a.gate, M, Into::Replace);
    matmul(w.up, w.up_bias, s.a.normed, s.a.up, M, Into::Replace);
    for (std::size_t i = 0; i < M * size(c.n_ff); ++i) {
      s.a.gate[i] = static_cast<float>(silu(s.a.gate[i]) * s.a.up[i]);
    }
  }

  void down_residual(const Config&, const LayerWeights& w, const Step& s) override {
    matmul(w.down, w.down_bias, s.a.gate, s.a.x, s.rows.size(), Into::Add);
  }

  void norm_head(const Config& c, const Weights& w, const Step& s, std::span<float> logits) override {
    const std::size_t n = logits.size() / size(c.n_vocab);
    const std::size_t first = s.rows.size() - n;
    for (std::size_t m = 0; m < n; ++m) {
      rms_norm(row_of(s.a.x, first + m, c.n_embd), w.output_norm, c.norm_eps,
               row_of(s.a.normed, m, c.n_embd));
    }
    matmul(w.head, {}, s.a.normed, logits, n, Into::Replace);
  }
};

}  // namespace

std::unique_ptr<Ops> make_reference_ops() { return std::make_unique<ReferenceOps>(); }

}  // namespace ringlm

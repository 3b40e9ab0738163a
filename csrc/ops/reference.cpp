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
  std::size_t quantized_bytes(const Config&, std::int64_t) const override { return 0; }
  std::size_t packed_bytes() const override { return 0; }
  bool packed() const override { return false; }
  std::size_t scratch_bytes() const override { return 0; }

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

  void rope_append(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    std::vector<float> shift(size(c.head_dim));  // c_e
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      const kv::Cache& cache = *s.rows[m].kv;
      const kv::Layout& l = cache.layout();
      const bool centre_keys = centred(w, cache);
      const auto epoch = [&](int e) { return row_of(s.a.rope_epochs, m * kEpochs + size(e), c.rope_dims); };
      for (std::int32_t h = 0; h < c.n_head; ++h) {
        const std::span<float> q = row_of(row_of(s.a.q, m, c.q_dim()), size(h), c.head_dim);
        const std::span<float> second = row_of(row_of(s.a.q_pinned, m, c.q_dim()), size(h), c.head_dim);
        std::copy(q.begin(), q.end(), second.begin());
        rope_apply(q, row_of(s.a.rope, m, c.rope_dims), c.rope_pairing);
        rope_apply(second, row_of(s.a.rope_pinned, m, c.rope_dims), c.rope_pairing);
        for (int e = 0; centre_keys && e < kEpochs; ++e) {
          centre(c, w, h / c.group(), epoch(e), shift);
          s.a.offsets[(m * size(c.n_head) + size(h)) * kEpochs + size(e)] =
              static_cast<float>(dot(e == kOfPinned ? second : q, shift));
        }
        if (l.k_format == KvFormat::Int8) {
          kv::rotate(cache.rotation(), q.data());
          kv::rotate(cache.rotation(), second.data());
        }
      }
      const std::int64_t slot = cache.ring(layer).slot(s.rows[m].position);
      for (std::int32_t h = 0; h < c.n_head_kv; ++h) {
        const std::span<float> k = row_of(row_of(s.a.k, m, c.kv_dim()), size(h), c.head_dim);
        const std::span<float> v = row_of(row_of(s.a.v, m, c.kv_dim()), size(h), c.head_dim);
        rope_apply(k, row_of(s.a.rope, m, c.rope_dims), c.rope_pairing);
        if (centre_keys) {
          centre(c, w, h, epoch(kOwn), shift);
          for (std::size_t i = 0; i < k.size(); ++i) k[i] -= shift[i];
        }
        if (l.k_format == KvFormat::Int8) kv::rotate(cache.rotation(), k.data());
        if (l.v_format == KvFormat::Int8) kv::rotate(cache.rotation(), v.data());
        kv::store_row(cache.k(layer, h), slot, k.data(), c.head_dim);
        kv::store_row(cache.v(layer, h), slot, v.data(), c.head_dim);
      }
    }
  }

  // Grouped-query attention (arXiv:2305.13245): query head h reads KV head h / group.
  void attend(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    const double scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    std::vector<float> row(size(c.head_dim));
    std::vector<double> score, sum(size(c.head_dim));
    std::vector<std::int64_t> visible;  // positions
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      const kv::Cache& cache = *s.rows[m].kv;
      const kv::Ring& ring = cache.ring(layer);
      const std::int64_t p = s.rows[m].position;
      visible.clear();
      for (std::int64_t t = 0; t < std::min(ring.pinned, p + 1); ++t) visible.push_back(t);
      for (std::int64_t t = ring.oldest(p); t <= p; ++t) visible.push_back(t);

      for (std::int32_t h = 0; h < c.n_head; ++h) {
        const std::span<float> q = row_of(row_of(s.a.q, m, c.q_dim()), size(h), c.head_dim);
        const std::span<float> second = row_of(row_of(s.a.q_pinned, m, c.q_dim()), size(h), c.head_dim);
        const std::span<float> offsets = row_of(s.a.offsets, m * size(c.n_head) + size(h), kEpochs);
        const kv::Rows k = cache.k(layer, h / c.group()), v = cache.v(layer, h / c.group());

        score.clear();
        for (const std::int64_t t : visible) {
          const bool pinned = t < ring.pinned;
          kv::load_row(k, ring.slot(t), row.data(), c.head_dim);
          double product = dot(pinned ? second : q, row);
          if (centred(w, cache)) product += offsets[epoch_of(cache.layout(), t, p, pinned)];
          score.push_back(product * scale);
        }
        const double largest = *std::max_element(score.begin(), score.end());
        double total = 0.0;
        std::fill(sum.begin(), sum.end(), 0.0);
        for (std::size_t i = 0; i < visible.size(); ++i) {
          const double weight = std::exp(score[i] - largest);
          total += weight;
          kv::load_row(v, ring.slot(visible[i]), row.data(), c.head_dim);
          for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += weight * row[j];
        }
        const std::span<float> out = row_of(row_of(s.a.att, m, c.q_dim()), size(h), c.head_dim);
        for (std::size_t j = 0; j < sum.size(); ++j) out[j] = static_cast<float>(sum[j] / total);
        if (v.format == KvFormat::Int8) kv::rotate_back(cache.rotation(), out.data());
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

  void norm_head(const Config& c, const Weights& w, const Step& s) override {
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      if (!s.rows[m].logits) continue;
      const std::span<float> normed = row_of(s.a.normed, m, c.n_embd);
      rms_norm(row_of(s.a.x, m, c.n_embd), w.output_norm, c.norm_eps, normed);
      matmul(w.head, {}, normed, {s.rows[m].logits, size(c.n_vocab)}, 1, Into::Replace);
    }
  }
};

}  // namespace

std::unique_ptr<Ops> make_reference_ops() { return std::make_unique<ReferenceOps>(); }

}  // namespace ringlm

#include "ops/reference.h"

#include <algorithm>
#include <cmath>
#include <numbers>
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

// y = W x + bias, for m_rows tokens.
void matmul(const Matrix& w, const Vector& bias, std::span<float> x, std::span<float> y, std::size_t m_rows) {
  std::vector<float> weights(size(w.cols));
  for (std::int32_t r = 0; r < w.rows; ++r) {
    dequantize(w.type, {w.row(r), w.row_bytes}, weights);
    for (std::size_t m = 0; m < m_rows; ++m) {
      const double sum = dot(weights, row_of(x, m, w.cols)) + (bias.empty() ? 0.0 : bias[size(r)]);
      y[m * size(w.rows) + size(r)] = static_cast<float>(sum);
    }
  }
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// GELU by tanh: x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and (1 + tanh u) / 2 is
// sigmoid(2 u).
double activation(Activation kind, double x) {
  if (kind == Activation::Silu) return x * sigmoid(x);
  return x * sigmoid(2.0 * std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x));
}

double soft_cap(double x, double cap) { return cap > 0.0 ? cap * std::tanh(x / cap) : x; }

class ReferenceOps final : public Ops {
 public:
  const char* name() const override { return "reference"; }
  int n_threads() const override { return 1; }
  std::size_t tile_floats(const Config&, std::int64_t) const override { return 0; }
  std::size_t quantized_bytes(const Config&, std::int64_t) const override { return 0; }
  std::size_t packed_bytes() const override { return 0; }
  bool packed() const override { return false; }
  std::size_t scratch_bytes() const override { return 0; }
  void begin(const Config&, const Step&, bool) override {}
  void finish(const Config& c, const Step& s) override { mark_rows_not_finite(c, s); }

  void embed(const Config& c, const Weights& w, const Step& s) override {
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      dequantize(w.token_embd.type, {w.token_embd.row(s.rows[m].token), w.token_embd.row_bytes},
                 row_of(s.a.x, m, c.n_embd));
      for (float& x : row_of(s.a.x, m, c.n_embd)) x *= c.embedding_scale;
    }
  }

  void norm_qkv(const Config& c, const LayerWeights& w, const Step& s) override {
    const std::size_t M = s.rows.size();
    const std::span<float> x = w.attn_norm.empty() ? s.a.x : normed(c, w.attn_norm, s);
    matmul(w.q, w.q_bias, x, s.a.q, M);
    matmul(w.k, w.k_bias, x, s.a.k, M);
    matmul(w.v, w.v_bias, x, s.a.v, M);
  }

  void rope_append(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    std::vector<float> shift(size(c.head_dim));  // c_e
    const Angles* angles = angles_of(c, layer, s);
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      const kv::Cache& cache = *s.rows[m].kv;
      const kv::Layout& l = cache.layout();
      const bool centre_keys = centred(w, cache);
      const auto epoch = [&](int e) { return row_of(angles->epochs, m * kEpochs + size(e), c.rope_dims); };
      const auto turn = [&](std::span<float> head, std::span<float> Angles::* where) {
        if (angles) rope_apply(head, row_of(angles->*where, m, c.rope_dims), c.rope_pairing);
      };
      norm_heads(c, w.q_norm, row_of(s.a.q, m, c.q_dim()));
      norm_heads(c, w.k_norm, row_of(s.a.k, m, c.kv_dim()));
      for (std::int32_t h = 0; h < c.n_head; ++h) {
        const std::span<float> q = row_of(row_of(s.a.q, m, c.q_dim()), size(h), c.head_dim);
        const std::span<float> second = row_of(row_of(s.a.q_pinned, m, c.q_dim()), size(h), c.head_dim);
        std::copy(q.begin(), q.end(), second.begin());
        turn(q, &Angles::own);
        turn(second, &Angles::pinned);
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
        turn(k, &Angles::own);
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
    mark_unfit_rows(c, s);
  }

  // Grouped-query attention (arXiv:2305.13245): query head h reads KV head h / group.
  void attend(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
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
          score.push_back(soft_cap(product * c.attention_scale, c.attn_softcap));
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

  void out_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    matmul(w.out, w.out_bias, s.a.att, s.a.normed, s.rows.size());
    add_normed(c, w.attn_post_norm, s);
  }

  void route(const Config& c, const LayerWeights& w, const Step& s) override {
    const std::span<float> x = normed(c, w.ffn_norm, s);
    std::vector<float> scores(size(c.n_expert));
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      const std::span<float> row = row_of(x, m, c.n_embd);
      matmul(w.router, {}, row, scores, 1);
      choose_experts(c, s, m, scores, c.n_ff_shared > 0 ? static_cast<float>(dot(row, w.shared_gate)) : 0.0f);
    }
    assign_slots(c, s);
    for (std::size_t i = 0; i < s.rows.size() * size(c.n_slots()); ++i) {
      const std::span<float> row = row_of(x, i / size(c.n_slots()), c.n_embd);
      std::ranges::copy(row, row_of(s.a.expert_x, size(s.a.routing.slots[i]), c.n_embd).begin());
    }
  }

  // SwiGLU and GeGLU (arXiv:2002.05202)
  void norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) override {
    const auto gate_up = [&](const FeedForward& n, std::span<float> x, std::size_t M, std::size_t at) {
      const std::span<float> gate = s.a.gate.subspan(at, M * size(n.gate.rows)), up = s.a.up.subspan(at);
      matmul(n.gate, n.gate_bias, x, gate, M);
      matmul(n.up, n.up_bias, x, up, M);
      for (std::size_t i = 0; i < gate.size(); ++i) {
        gate[i] = static_cast<float>(activation(c.activation, gate[i]) * up[i]);
      }
    };
    if (w.experts.empty()) {
      return gate_up(w.ff, w.ffn_norm.empty() ? s.a.x : normed(c, w.ffn_norm, s), s.rows.size(), 0);
    }
    for_each_run(c, w, s, [&](const ExpertRun& r) {
      gate_up(r.network, s.a.expert_x.subspan(size(r.first) * size(c.n_embd)), size(r.n), r.gate);
    });
  }

  void down_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    const std::size_t M = s.rows.size();
    if (w.experts.empty()) {
      matmul(w.ff.down, w.ff.down_bias, s.a.gate, s.a.normed, M);
      return add_normed(c, w.ffn_post_norm, s);
    }
    for_each_run(c, w, s, [&](const ExpertRun& r) {
      matmul(r.network.down, r.network.down_bias, s.a.gate.subspan(r.gate),
             s.a.expert_x.subspan(size(r.first) * size(c.n_embd)), size(r.n));
    });
    std::fill_n(s.a.normed.begin(), M * size(c.n_embd), 0.0f);
    for (std::size_t i = 0; i < M * size(c.n_slots()); ++i) {
      const std::span<float> sum = row_of(s.a.normed, i / size(c.n_slots()), c.n_embd);
      const std::span<float> y = row_of(s.a.expert_x, size(s.a.routing.slots[i]), c.n_embd);
      for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += s.a.routing.weights[i] * y[j];
    }
    add_normed(c, w.ffn_post_norm, s);
  }

  void norm_head(const Config& c, const Weights& w, const Step& s) override {
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      if (!s.rows[m].logits) continue;
      const std::span<float> normed = row_of(s.a.normed, m, c.n_embd);
      const std::span<float> logits(s.rows[m].logits, size(c.n_vocab));
      rms_norm(row_of(s.a.x, m, c.n_embd), w.output_norm, c.norm_eps, normed);
      matmul(w.head, {}, normed, logits, 1);
      for (float& x : logits) {
        x = static_cast<float>(soft_cap(static_cast<double>(x) * c.logit_scale, c.final_softcap));
      }
    }
  }

 private:
  // Every row of x, into Activations::normed.
  static std::span<float> normed(const Config& c, const Vector& w, const Step& s) {
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      rms_norm(row_of(s.a.x, m, c.n_embd), w, c.norm_eps, row_of(s.a.normed, m, c.n_embd));
    }
    return s.a.normed;
  }

  // Each head by itself, or all together, as long as the weight is. heads [n, head_dim]
  static void norm_heads(const Config& c, const Vector& w, std::span<float> heads) {
    if (w.empty()) return;
    for (std::size_t at = 0; at < heads.size(); at += w.size()) {
      const std::span<float> part = heads.subspan(at, w.size());
      rms_norm(part, w, c.norm_eps, part);
    }
  }

  // x += scale * norm(Activations::normed), for every row.
  static void add_normed(const Config& c, const Vector& w, const Step& s) {
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      const std::span<float> x = row_of(s.a.x, m, c.n_embd), y = row_of(s.a.normed, m, c.n_embd);
      if (!w.empty()) rms_norm(y, w, c.norm_eps, y);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] += c.residual_scale * y[i];
    }
  }
};

}  // namespace

std::unique_ptr<Ops> make_reference_ops() { return std::make_unique<ReferenceOps>(); }

}  // namespace ringlm

#include "cpu/cpu_ops.h"

#include <algorithm>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/team.h"
#include "model/rope.h"

namespace ringlm {
namespace {

const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// What one thread needs: float32 weight rows of a matmul, or one head.
std::size_t scratch_floats(const Config& c) {
  return cpu::matmul_scratch(std::max({c.n_embd, c.q_dim(), c.n_ff, c.head_dim}));
}

float dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return static_cast<float>(sum);
}

class CpuOps final : public Ops {
 public:
  CpuOps(const Config& c, int n_threads)
      : team_(n_threads > 0 ? n_threads : cpu::default_thread_count()),
        k_(cpu::kernels()),
        rotation_(kv::make_rotation(c.head_dim)),
        rotation_tables_(cpu::rotation_tables(rotation_)),
        scratch_floats_(scratch_floats(c)),
        scratch_(scratch_floats_ * size(team_.size())),
        attention_(c, k_, rotation_, rotation_tables_, team_.size()) {}

  const char* name() const override { return k_.name; }
  int n_threads() const override { return team_.size(); }

  std::size_t tile_floats(const Config& c, std::int64_t tiles) const override {
    return cpu::Attention::tile_floats(c, tiles);
  }
  std::size_t scratch_bytes() const override {
    return (scratch_.size() + rotation_tables_.size()) * sizeof(float) + attention_.bytes();
  }

  void embed(const Config& c, const Weights& w, const Step& s) override {
    team_.run([&](int thread) {
      for (std::size_t m = size(thread); m < s.rows.size(); m += size(team_.size())) {
        k_.dequantize_row(w.token_embd.type, u8(w.token_embd.row(s.rows[m].token)),
                          &s.a.x[m * size(c.n_embd)], c.n_embd);
      }
    });
  }

  void norm_qkv(const Config& c, const LayerWeights& w, const Step& s) override {
    const std::size_t M = s.rows.size();
    team_.run([&](int thread) {
      norm(c, w.attn_norm, s.a.x, s.a.normed, M, thread);
      team_.barrier();
      matmul(w.q, w.q_bias, s.a.normed, s.a.q, M, false, thread);
      matmul(w.k, w.k_bias, s.a.normed, s.a.k, M, false, thread);
      matmul(w.v, w.v_bias, s.a.normed, s.a.v, M, false, thread);
    });
  }

  void rope_append(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    const auto M = static_cast<std::int64_t>(s.rows.size());
    const auto part = [](std::span<float> buffer, std::int64_t index, std::int64_t width) {
      return buffer.subspan(size(index * width), size(width));
    };
    team_.run([&](int thread) {
      const std::span<float> shift(scratch(thread), size(c.head_dim));  // c_e
      const auto [q_begin, q_end] = cpu::share(M * c.n_head, thread, team_.size());
      for (std::int64_t i = q_begin; i < q_end; ++i) {
        const std::int64_t m = i / c.n_head;
        const kv::Cache& cache = *s.rows[size(m)].kv;
        const bool second = cache.ring(layer).pinned > 0;
        const std::span<float> q = part(s.a.q, i, c.head_dim), q_pinned = part(s.a.q_pinned, i, c.head_dim);
        if (second) {
          std::copy(q.begin(), q.end(), q_pinned.begin());
          rope_apply(q_pinned, part(s.a.rope_pinned, m, c.rope_dims), c.rope_pairing);
        }
        rope_apply(q, part(s.a.rope, m, c.rope_dims), c.rope_pairing);
        if (centred(w, cache)) {
          const auto head = static_cast<std::int32_t>(i % c.n_head) / c.group();
          for (int e = 0; e < kEpochs; ++e) {
            if (e == kOfPinned && !second) continue;
            centre(c, w, head, part(s.a.rope_epochs, m * kEpochs + e, c.rope_dims), shift);
            s.a.offsets[size(i * kEpochs + e)] = dot(e == kOfPinned ? q_pinned : q, shift);
          }
        }
        if (cache.layout().k_format == KvFormat::Int8) {
          rotate(q.data(), false);
          if (second) rotate(q_pinned.data(), false);
        }
      }
      const auto [k_begin, k_end] = cpu::share(M * c.n_head_kv, thread, team_.size());
      for (std::int64_t i = k_begin; i < k_end; ++i) {
        const std::int64_t m = i / c.n_head_kv;
        const Row& row = s.rows[size(m)];
        const auto head = static_cast<std::int32_t>(i % c.n_head_kv);
        const std::span<float> k = part(s.a.k, i, c.head_dim), v = part(s.a.v, i, c.head_dim);
        rope_apply(k, part(s.a.rope, m, c.rope_dims), c.rope_pairing);
        if (centred(w, *row.kv)) {
          centre(c, w, head, part(s.a.rope_epochs, m * kEpochs + kOwn, c.rope_dims), shift);
          for (std::size_t j = 0; j < k.size(); ++j) k[j] -= shift[j];
        }
        const kv::Rows keys = row.kv->k(layer, head), values = row.kv->v(layer, head);
        if (keys.format == KvFormat::Int8) rotate(k.data(), false);
        if (values.format == KvFormat::Int8) rotate(v.data(), false);
        const std::int64_t slot = row.kv->ring(layer).slot(row.position);
        k_.store_row(keys, slot, k.data(), c.head_dim);
        k_.store_row(values, slot, v.data(), c.head_dim);
      }
    });
  }

  void attend(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    attention_.run(team_, c, w, layer, s);
  }

  void out_residual(const Config&, const LayerWeights& w, const Step& s) override {
    team_.run([&](int thread) { matmul(w.out, w.out_bias, s.a.att, s.a.x, s.rows.size(), true, thread); });
  }

  void norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) override {
    const std::size_t M = s.rows.size();
    team_.run([&](int thread) {
      norm(c, w.ffn_norm, s.a.x, s.a.normed, M, thread);
      team_.barrier();
      matmul(w.gate, w.gate_bias, s.a.normed, s.a.gate, M, false, thread);
      matmul(w.up, w.up_bias, s.a.normed, s.a.up, M, false, thread);
      const auto [begin, end] =
          cpu::share(c.n_ff, thread, team_.size());  // the columns that this thread just wrote
      for (std::size_t m = 0; m < M; ++m) {
        const std::size_t at = m * size(c.n_ff) + size(begin);
        k_.silu_mul(&s.a.gate[at], &s.a.up[at], end - begin);
      }
    });
  }

  void down_residual(const Config&, const LayerWeights& w, const Step& s) override {
    team_.run([&](int thread) { matmul(w.down, w.down_bias, s.a.gate, s.a.x, s.rows.size(), true, thread); });
  }

  void norm_head(const Config& c, const Weights& w, const Step& s) override {
    std::size_t n = 0;  // rows that want logits come together at the front of `normed`
    for (std::size_t m = 0; m < s.rows.size(); ++m) {
      if (!s.rows[m].logits) continue;
      k_.rms_norm(&s.a.x[m * size(c.n_embd)], w.output_norm.data(), c.norm_eps,
                  &s.a.normed[n * size(c.n_embd)], c.n_embd);
      s.a.heads[n++] = s.rows[m].logits;
    }
    if (n == 0) return;
    team_.run([&](int thread) { matmul(w.head, {}, s.a.normed, {}, n, false, thread, s.a.heads.data()); });
  }

 private:
  float* scratch(int thread) { return scratch_.data() + size(thread) * scratch_floats_; }

  void rotate(float* head, bool back) const { k_.rotate(rotation_, rotation_tables_.data(), head, back); }

  // This thread's rows of the step.
  void norm(const Config& c, const Vector& w, std::span<float> x, std::span<float> y, std::size_t M,
            int thread) {
    for (std::size_t m = size(thread); m < M; m += size(team_.size())) {
      k_.rms_norm(&x[m * size(c.n_embd)], w.data(), c.norm_eps, &y[m * size(c.n_embd)], c.n_embd);
    }
  }

  // This thread's share of the outputs, into y [M, rows] or into a row of its own for every token.
  void matmul(const Matrix& w, const Vector& bias, std::span<float> x, std::span<float> y, std::size_t M,
              bool add, int thread, float* const* into = nullptr) {
    const cpu::MatmulArgs args{w.type,
                               u8(w.data.data()),
                               w.row_bytes,
                               w.cols,
                               bias.empty() ? nullptr : bias.data(),
                               x.data(),
                               static_cast<std::int32_t>(M),
                               y.data(),
                               w.rows,
                               add,
                               into};
    const auto [begin, end] = cpu::share(w.rows, thread, team_.size());
    k_.matmul(args, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end), scratch(thread));
  }

  cpu::Team team_;
  const cpu::Kernels& k_;
  const kv::Rotation rotation_;  // of every INT8 cache of the model
  const std::vector<float> rotation_tables_;
  std::size_t scratch_floats_;
  std::vector<float> scratch_;  // [threads, scratch_floats_]
  cpu::Attention attention_;
};

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(const Config& config, int n_threads) {
  return std::make_unique<CpuOps>(config, n_threads);
}

}  // namespace ringlm

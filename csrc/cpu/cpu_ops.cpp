#include "cpu/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/products.h"
#include "cpu/team.h"
#include "model/rope.h"

namespace ringlm {
namespace {

using cpu::Claims;
using cpu::Input;
using cpu::MatrixView;
using cpu::Product;

const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

float dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return static_cast<float>(sum);
}

class CpuOps final : public Ops {
 public:
  CpuOps(const Config& c, const Weights& w, const CpuOptions& options)
      : shared_team_(
            cpu::Team::shared(options.n_threads > 0 ? options.n_threads : cpu::default_thread_count())),
        team_(*shared_team_),
        k_(cpu::kernels()),
        rotation_(kv::make_rotation(c.head_dim)),
        rotation_tables_(cpu::rotation_tables(rotation_)),
        products_(c, w, k_, team_, options.pack),
        attention_(c, k_, rotation_, rotation_tables_, team_.size()) {}

  const char* name() const override { return k_.name; }
  int n_threads() const override { return team_.size(); }

  std::size_t tile_floats(const Config& c, std::int64_t tiles) const override {
    return cpu::Attention::tile_floats(c, tiles);
  }
  std::size_t quantized_bytes(const Config& c, std::int64_t M) const override {
    return products_.quantized_bytes(c, M);
  }
  std::size_t packed_bytes() const override { return products_.packed_bytes(); }
  bool packed() const override { return products_.packed(); }
  std::size_t scratch_bytes() const override {
    return products_.scratch_bytes() + rotation_tables_.size() * sizeof(float) + attention_.bytes();
  }

  void begin(const Config&, const Step&, bool) override {}
  void finish(const Config& c, const Step& s) override { mark_rows_not_finite(c, s); }

  void embed(const Config& c, const Weights& w, const Step& s) override {
    const MatrixView& table = products_.matrix(w.token_embd);
    team_.run([&](int thread) {
      auto* row = reinterpret_cast<std::uint8_t*>(products_.scratch(thread));  // at most 4 bytes an element
      for (std::size_t m = size(thread); m < s.rows.size(); m += size(team_.size())) {
        if (table.packed) cpu::unpack_row(table, s.rows[m].token, row);
        const std::span<float> x = row_of(s.a.x, m, c.n_embd);
        k_.dequantize_row(table.type, table.packed ? row : u8(w.token_embd.row(s.rows[m].token)), x.data(),
                          c.n_embd);
        if (c.embedding_scale == 1.0f) continue;
        for (float& value : x) value *= c.embedding_scale;
      }
    });
  }

  void norm_qkv(const Config& c, const LayerWeights& w, const Step& s) override {
    const Product products[] = {products_.product(w.q, w.q_bias, s.a.q),
                                products_.product(w.k, w.k_bias, s.a.k),
                                products_.product(w.v, w.v_bias, s.a.v)};
    Claims claims = products_.claims(products, s.rows.size());
    team_.run([&](int thread) {
      const Input x = products_.normed(c, w.attn_norm, s, products, thread);
      for (std::int64_t begin, end; claims.take(thread, begin, end);)
        products_.multiply(products, x, begin, end, thread);
    });
  }

  void rope_append(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    const auto M = static_cast<std::int64_t>(s.rows.size());
    const Angles* angles = angles_of(c, layer, s);
    const auto turn = [&](std::span<float> head, std::span<float> Angles::* where, std::int64_t m) {
      if (angles) rope_apply(head, row_of(angles->*where, size(m), c.rope_dims), c.rope_pairing);
    };
    const auto epoch = [&](std::int64_t m, int e) {
      return row_of(angles->epochs, size(m * kEpochs + e), c.rope_dims);
    };
    team_.run([&](int thread) {
      if (c.qk_norm == QkNorm::Full) norm_all_heads(c, w, s, thread);
      const std::span<float> shift(products_.scratch(thread), size(c.head_dim));  // c_e
      const auto [q_begin, q_end] = cpu::share(M * c.n_head, thread, team_.size());
      for (std::int64_t i = q_begin; i < q_end; ++i) {
        const std::int64_t m = i / c.n_head;
        const kv::Cache& cache = *s.rows[size(m)].kv;
        const bool second = cache.ring(layer).pinned > 0;
        const std::span<float> q = row_of(s.a.q, size(i), c.head_dim);
        const std::span<float> q_pinned = row_of(s.a.q_pinned, size(i), c.head_dim);
        if (c.qk_norm == QkNorm::Head) norm(c, w.q_norm, q);
        if (second) {
          std::copy(q.begin(), q.end(), q_pinned.begin());
          turn(q_pinned, &Angles::pinned, m);
        }
        turn(q, &Angles::own, m);
        if (centred(w, cache)) {
          const auto head = static_cast<std::int32_t>(i % c.n_head) / c.group();
          for (int e = 0; e < kEpochs; ++e) {
            if (e == kOfPinned && !second) continue;
            centre(c, w, head, epoch(m, e), shift);
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
        const std::span<float> k = row_of(s.a.k, size(i), c.head_dim);
        const std::span<float> v = row_of(s.a.v, size(i), c.head_dim);
        if (c.qk_norm == QkNorm::Head) norm(c, w.k_norm, k);
        turn(k, &Angles::own, m);
        if (centred(w, *row.kv)) {
          centre(c, w, head, epoch(m, kOwn), shift);
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
    mark_unfit_rows(c, s);
  }

  void attend(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    attention_.run(team_, c, w, layer, s);
  }

  void out_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    add_projection(c, w.out, w.out_bias, w.attn_post_norm, s.a.att, s);
  }

  void route(const Config& c, const LayerWeights& w, const Step& s) override {
    const Product router[] = {products_.product(w.router, {}, s.a.routing.scores)};
    Claims claims = products_.claims(router, s.rows.size());
    team_.run([&](int thread) {
      const Input x = products_.normed(c, w.ffn_norm, s, router, thread);
      if (s.rows.size() == 1 && thread == 0) std::copy_n(x.x, c.n_embd, s.a.normed.begin());
      for (std::int64_t begin, end; claims.take(thread, begin, end);)
        products_.multiply(router, x, begin, end, thread);
      team_.barrier();
      for_my_rows(s, thread, [&](std::size_t m) {
        const float shared = c.n_ff_shared > 0 ? dot(row_of(s.a.normed, m, c.n_embd), w.shared_gate) : 0.0f;
        choose_experts(c, s, m, row_of(s.a.routing.scores, m, c.n_expert), shared);
      });
    });
    assign_slots(c, s);
  }

  void norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) override {
    if (!w.experts.empty()) return experts_gate_up(c, w, s);
    const Product gate[] = {products_.product(w.ff.gate, w.ff.gate_bias, s.a.gate)};
    const Product up[] = {products_.product(w.ff.up, w.ff.up_bias, s.a.up)};
    const Product both[] = {gate[0], up[0]};
    Claims claims = products_.claims(gate, s.rows.size());
    team_.run([&](int thread) {
      const Input x = products_.normed(c, w.ffn_norm, s, both, thread);
      for (std::int64_t begin, end; claims.take(thread, begin, end);)
        gate_up(c, gate[0], up[0], x, begin, end, thread);
    });
  }

  void down_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    if (!w.experts.empty()) return experts_down(c, w, s);
    add_projection(c, w.ff.down, w.ff.down_bias, w.ffn_post_norm, s.a.gate, s);
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
    Product head[] = {products_.product(w.head, {}, {})};
    head[0].into = s.a.heads.data();
    Claims claims = products_.claims(head, n);
    team_.run([&](int thread) {
      const Input x = products_.input(s.a.normed, n, s, head, thread);
      for (std::int64_t begin, end; claims.take(thread, begin, end);)
        products_.multiply(head, x, begin, end, thread);
      if (c.logit_scale == 1.0f && c.final_softcap == 0.0f) return;
      team_.barrier();
      const auto [begin, end] = cpu::share(c.n_vocab, thread, team_.size());
      for (std::size_t i = 0; i < n; ++i) {
        k_.soft_cap(s.a.heads[i] + begin, end - begin, c.logit_scale, c.final_softcap);
      }
    });
  }

 private:
  static std::span<float> row_of(std::span<float> buffer, std::size_t index, std::int64_t width) {
    return buffer.subspan(index * size(width), size(width));
  }

  void rotate(float* head, bool back) const { k_.rotate(rotation_, rotation_tables_.data(), head, back); }

  void norm(const Config& c, const Vector& weight, std::span<float> x) const {
    k_.rms_norm(x.data(), weight.data(), c.norm_eps, x.data(), static_cast<std::int32_t>(x.size()));
  }

  // Calls f with the rows of the step that are this thread's.
  template <class F>
  void for_my_rows(const Step& s, int thread, F f) const {
    for (std::size_t m = size(thread); m < s.rows.size(); m += size(team_.size())) f(m);
  }

  // Queries and keys, all heads of a row together.
  void norm_all_heads(const Config& c, const LayerWeights& w, const Step& s, int thread) {
    for_my_rows(s, thread, [&](std::size_t m) {
      norm(c, w.q_norm, row_of(s.a.q, m, c.q_dim()));
      norm(c, w.k_norm, row_of(s.a.k, m, c.kv_dim()));
    });
    team_.barrier();
  }

  // Groups [begin, end) of both, and activation(gate) * up of their rows.
  void gate_up(const Config& c, const Product& gate, const Product& up, const Input& x, std::int64_t begin,
               std::int64_t end, int thread) {
    products_.multiply({&gate, 1}, x, begin, end, thread);
    products_.multiply({&up, 1}, x, begin, end, thread);
    const std::int64_t n_ff = gate.w->rows, first = begin * cpu::kGroup;
    const std::int64_t n = std::min(end * cpu::kGroup, n_ff) - first;
    const auto multiply = c.activation == Activation::Gelu ? k_.gelu_mul : k_.silu_mul;
    for (std::size_t m = 0; m < x.M; ++m) {
      const std::size_t at = m * size(n_ff) + size(first);
      multiply(gate.y + at, up.y + at, n);
    }
  }

  // x += scale * norm(projection of `from`, plus bias)
  void add_projection(const Config& c, const Matrix& w, const Vector& bias, const Vector& post_norm,
                      std::span<const float> from, const Step& s) {
    const bool direct = post_norm.empty() && c.residual_scale == 1.0f;
    Product p[] = {products_.product(w, bias, direct ? s.a.x : s.a.normed)};
    p[0].add = direct;
    Claims claims = products_.claims(p, s.rows.size());
    team_.run([&](int thread) {
      const Input in = products_.input(from, s.rows.size(), s, p, thread);
      for (std::int64_t begin, end; claims.take(thread, begin, end);)
        products_.multiply(p, in, begin, end, thread);
      if (direct) return;
      team_.barrier();
      for_my_rows(s, thread, [&](std::size_t m) { add_normed(c, post_norm, s, m); });
    });
  }

  // x += scale * norm(Activations::normed), of one row.
  void add_normed(const Config& c, const Vector& post_norm, const Step& s, std::size_t m) const {
    const std::span<float> x = row_of(s.a.x, m, c.n_embd), y = row_of(s.a.normed, m, c.n_embd);
    if (!post_norm.empty()) norm(c, post_norm, y);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += c.residual_scale * y[i];
  }

  // The products of all experts' runs. `matrix` tells how many groups of rows there are; rows(run) is the
  // input [n, cols], quantized where wants(run); each(run, x, begin, end) multiplies groups of it.
  template <class Wants, class Rows, class Each>
  void for_each_expert(const Config& c, const LayerWeights& w, const Step& s, Matrix FeedForward::* matrix,
                       Wants wants, Rows rows, Each each, int thread, Claims& claims) {
    std::size_t at = 0;  // in Activations::quantized
    for_each_run(c, w, s, [&](const ExpertRun& r) {
      if (!wants(r)) return;
      const std::int32_t cols = (r.network.*matrix).cols;
      for (std::int64_t j = 0; j < r.n; ++j) {
        if ((r.first + j) % team_.size() != thread) continue;
        k_.quantize(rows(r) + j * cols, cols, s.a.quantized.data() + at, j, r.n);
      }
      at += cpu::run_bytes(cols, r.n);
    });
    team_.barrier();
    for (std::int64_t begin, end; claims.take(thread, begin, end);) {
      std::int64_t first = 0;
      at = 0;
      for_each_run(c, w, s, [&](const ExpertRun& r) {
        const MatrixView& view = products_.matrix(r.network.*matrix);
        const std::int64_t last = first + view.groups();
        const std::int64_t from = std::clamp(begin, first, last), to = std::clamp(end, first, last);
        const bool quantized = wants(r);
        if (from < to) {
          const Input x{rows(r), quantized ? s.a.quantized.data() + at : nullptr, size(r.n)};
          each(r, x, from - first, to - first);
        }
        first = last;
        if (quantized) at += cpu::run_bytes(view.cols, r.n);
      });
    }
  }

  bool wants_quantized(const Matrix& m) const {
    const Product one[] = {products_.product(m, {}, {})};
    return cpu::Products::want_quantized(one);
  }

  Claims expert_claims(const Config& c, const LayerWeights& w, const Step& s,
                       Matrix FeedForward::* matrix) const {
    std::int64_t groups = 0;
    for_each_run(c, w, s,
                 [&](const ExpertRun& r) { groups += products_.matrix(r.network.*matrix).groups(); });
    return products_.claims(groups, products_.matrix(w.experts[0].*matrix).group_bytes(), s.rows.size());
  }

  void experts_gate_up(const Config& c, const LayerWeights& w, const Step& s) {
    Claims claims = expert_claims(c, w, s, &FeedForward::gate);
    const std::size_t n_slots = size(c.n_slots());
    team_.run([&](int thread) {
      for (std::size_t i = size(thread); i < s.rows.size() * n_slots; i += size(team_.size())) {
        std::ranges::copy(row_of(s.a.normed, i / n_slots, c.n_embd),
                          row_of(s.a.expert_x, size(s.a.routing.slots[i]), c.n_embd).begin());
      }
      team_.barrier();
      for_each_expert(
          c, w, s, &FeedForward::gate,
          [&](const ExpertRun& r) {
            return wants_quantized(r.network.gate) || wants_quantized(r.network.up);
          },
          [&](const ExpertRun& r) { return &s.a.expert_x[size(r.first * c.n_embd)]; },
          [&](const ExpertRun& r, const Input& x, std::int64_t begin, std::int64_t end) {
            const FeedForward& n = r.network;
            gate_up(c, products_.product(n.gate, n.gate_bias, s.a.gate.subspan(r.gate)),
                    products_.product(n.up, n.up_bias, s.a.up.subspan(r.gate)), x, begin, end, thread);
          },
          thread, claims);
    });
  }

  void experts_down(const Config& c, const LayerWeights& w, const Step& s) {
    Claims claims = expert_claims(c, w, s, &FeedForward::down);
    const std::size_t n_slots = size(c.n_slots());
    team_.run([&](int thread) {
      for_each_expert(
          c, w, s, &FeedForward::down, [&](const ExpertRun& r) { return wants_quantized(r.network.down); },
          [&](const ExpertRun& r) { return &s.a.gate[r.gate]; },
          [&](const ExpertRun& r, const Input& x, std::int64_t begin, std::int64_t end) {
            const Product down[] = {products_.product(r.network.down, r.network.down_bias,
                                                      s.a.expert_x.subspan(size(r.first * c.n_embd)))};
            products_.multiply(down, x, begin, end, thread);
          },
          thread, claims);
      team_.barrier();
      for_my_rows(s, thread, [&](std::size_t m) {
        const std::span<float> sum = row_of(s.a.normed, m, c.n_embd);
        std::ranges::fill(sum, 0.0f);
        for (std::size_t i = m * n_slots; i < (m + 1) * n_slots; ++i) {
          const std::span<const float> y = row_of(s.a.expert_x, size(s.a.routing.slots[i]), c.n_embd);
          const float weight = s.a.routing.weights[i];
          for (std::size_t j = 0; j < sum.size(); ++j) sum[j] += weight * y[j];
        }
        add_normed(c, w.ffn_post_norm, s, m);
      });
    });
  }

  const std::shared_ptr<cpu::Team> shared_team_;  // with the other models of the process
  cpu::Team& team_;
  const cpu::Kernels& k_;
  const kv::Rotation rotation_;  // of every INT8 cache of the model
  const std::vector<float> rotation_tables_;
  cpu::Products products_;
  cpu::Attention attention_;
};

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(const Config& config, const Weights& weights, const CpuOptions& options) {
  return std::make_unique<CpuOps>(config, weights, options);
}

}  // namespace ringlm

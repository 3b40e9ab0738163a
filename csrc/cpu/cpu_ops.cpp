#include "cpu/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "model/rope.h"

namespace ringlm {
namespace {

using cpu::kTile;
using cpu::Partial;

const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
std::uint8_t* u8(std::byte* p) { return reinterpret_cast<std::uint8_t*>(p); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t tile_count(std::int64_t positions) { return (positions + kTile - 1) / kTile; }

// What one thread needs: float32 weight rows of a matmul, or one tile of attention and the state of a group.
std::size_t scratch_floats(const Config& c) {
  const std::int32_t widest = std::max({c.n_embd, c.q_dim(), c.n_ff});
  const std::size_t group_sums = size(c.group()) * size(c.head_dim);
  return std::max(cpu::matmul_scratch(widest), cpu::tile_scratch(c.head_dim) + 2 * group_sums);
}

class CpuOps final : public Ops {
 public:
  CpuOps(const Config& c, int n_threads)
      : team_(n_threads > 0 ? n_threads : cpu::default_thread_count()),
        k_(cpu::kernels()),
        scratch_floats_(scratch_floats(c)),
        scratch_(scratch_floats_ * size(team_.size())),
        parts_(2 * size(c.group()) * size(team_.size())) {}

  const char* name() const override { return k_.name; }
  int n_threads() const override { return team_.size(); }

  // Of one row: a state per tile and head.
  std::size_t tile_floats(const Config& c, std::int64_t capacity) const override {
    return size(tile_count(capacity)) * size(c.n_head) * (size(c.head_dim) + sizeof(Partial) / sizeof(float));
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

  void rope_append(const Config& c, std::int32_t layer, const Step& s) override {
    const auto M = static_cast<std::int64_t>(s.rows.size());
    const auto turn = [&](std::span<float> heads, std::int64_t index, std::int64_t m) {
      const std::span<float> head = heads.subspan(size(index) * size(c.head_dim), size(c.head_dim));
      rope_apply(head, s.a.rope.subspan(size(m) * size(c.rope_dims), size(c.rope_dims)), c.rope_pairing);
      return head.data();
    };
    team_.run([&](int thread) {
      const auto [q_begin, q_end] = cpu::share(M * c.n_head, thread, team_.size());
      for (std::int64_t i = q_begin; i < q_end; ++i) turn(s.a.q, i, i / c.n_head);
      const auto [k_begin, k_end] = cpu::share(M * c.n_head_kv, thread, team_.size());
      for (std::int64_t i = k_begin; i < k_end; ++i) {
        const Row& row = s.rows[size(i / c.n_head_kv)];
        const auto head = static_cast<std::int32_t>(i % c.n_head_kv);
        const kv::Layout& l = row.kv->layout();
        const std::size_t slot = size(row.position);
        k_.store_row(l.k_format, turn(s.a.k, i, i / c.n_head_kv),
                     u8(row.kv->k(layer, head) + slot * l.k_row_bytes()), c.head_dim);
        k_.store_row(l.v_format, &s.a.v[size(i) * size(c.head_dim)],
                     u8(row.kv->v(layer, head) + slot * l.v_row_bytes()), c.head_dim);
      }
    });
  }

  // The visible positions are cut into tiles at multiples of kTile; a tile's result does not depend on who
  // computes it, and results are merged in position order, so both ways below give the same bits.
  void attend(const Config& c, std::int32_t layer, const Step& s) override {
    if (s.rows.size() == 1) {
      attend_split(c, layer, s);
    } else {
      attend_whole(c, layer, s);
    }
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

  void norm_head(const Config& c, const Weights& w, const Step& s, std::span<float> logits) override {
    const std::size_t n = logits.size() / size(c.n_vocab);
    const std::span<float> x = s.a.x.subspan((s.rows.size() - n) * size(c.n_embd));
    team_.run([&](int thread) {
      norm(c, w.output_norm, x, s.a.normed, n, thread);
      team_.barrier();
      matmul(w.head, {}, s.a.normed, logits, n, false, thread);
    });
  }

 private:
  float* scratch(int thread) { return scratch_.data() + size(thread) * scratch_floats_; }

  // This thread's rows of the step.
  void norm(const Config& c, const Vector& w, std::span<float> x, std::span<float> y, std::size_t M,
            int thread) {
    for (std::size_t m = size(thread); m < M; m += size(team_.size())) {
      k_.rms_norm(&x[m * size(c.n_embd)], w.data(), c.norm_eps, &y[m * size(c.n_embd)], c.n_embd);
    }
  }

  // This thread's share of the outputs.
  void matmul(const Matrix& w, const Vector& bias, std::span<float> x, std::span<float> y, std::size_t M,
              bool add, int thread) {
    const cpu::MatmulArgs args{w.type,
                               u8(w.data.data()),
                               w.row_bytes,
                               w.cols,
                               bias.empty() ? nullptr : bias.data(),
                               x.data(),
                               static_cast<std::int32_t>(M),
                               y.data(),
                               w.rows,
                               add};
    const auto [begin, end] = cpu::share(w.rows, thread, team_.size());
    k_.matmul(args, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end), scratch(thread));
  }

  // Tile `tile` of KV head `head` for row m.
  void attend_tile(const Config& c, std::int32_t layer, const Step& s, std::size_t m, std::int32_t head,
                   std::int64_t tile, Partial* parts, float* sums, float* tile_scratch) {
    const Row& row = s.rows[m];
    const kv::Layout& l = row.kv->layout();
    const std::int64_t first = tile * kTile;
    const cpu::TileArgs args{
        &s.a.q[m * size(c.q_dim()) + size(head) * size(c.group()) * size(c.head_dim)],
        c.group(),
        c.head_dim,
        1.0f / std::sqrt(static_cast<float>(c.head_dim)),
        l.k_format,
        l.v_format,
        u8(row.kv->k(layer, head) + size(first) * l.k_row_bytes()),
        u8(row.kv->v(layer, head) + size(first) * l.v_row_bytes()),
        static_cast<std::int32_t>(std::min<std::int64_t>(kTile, row.position + 1 - first))};
    k_.attend_tile(args, parts, sums, tile_scratch);
  }

  // Decode: few heads, many positions. Threads take tiles; then each head merges its own.
  void attend_split(const Config& c, std::int32_t layer, const Step& s) {
    const std::int64_t tiles = tile_count(s.rows[0].position + 1);
    const std::size_t states = size(tiles) * size(c.n_head);  // [tiles, n_head]
    auto* parts = reinterpret_cast<Partial*>(s.a.tiles.data());
    float* sums = s.a.tiles.data() + states * sizeof(Partial) / sizeof(float);
    team_.run([&](int thread) {
      for (std::int64_t i = thread; i < tiles * c.n_head_kv; i += team_.size()) {
        const std::int64_t tile = i / c.n_head_kv;
        const auto head = static_cast<std::int32_t>(i % c.n_head_kv);
        const std::size_t state = size(tile) * size(c.n_head) + size(head) * size(c.group());
        attend_tile(c, layer, s, 0, head, tile, parts + state, sums + state * size(c.head_dim),
                    scratch(thread));
      }
      team_.barrier();
      for (std::int64_t h = thread; h < c.n_head; h += team_.size()) {
        for (std::int64_t tile = 1; tile < tiles; ++tile) {
          const std::size_t from = size(tile) * size(c.n_head) + size(h);
          k_.merge(parts[h], sums + h * c.head_dim, parts[from], sums + from * size(c.head_dim), c.head_dim);
        }
        k_.finish(parts[h], sums + h * c.head_dim, &s.a.att[size(h) * size(c.head_dim)], c.head_dim);
      }
    });
  }

  // Prefill: many rows. A thread takes a row and KV head through all its tiles.
  void attend_whole(const Config& c, std::int32_t layer, const Step& s) {
    const std::int32_t group = c.group(), d = c.head_dim;
    const auto items = static_cast<std::int64_t>(s.rows.size()) * c.n_head_kv;
    team_.run([&](int thread) {
      float* into_sums = scratch(thread) + cpu::tile_scratch(d);
      float* from_sums = into_sums + group * d;
      Partial* into = parts_.data() + 2 * size(group) * size(thread);
      Partial* from = into + group;
      for (std::int64_t i = thread; i < items; i += team_.size()) {
        const std::size_t m = size(i / c.n_head_kv);
        const auto head = static_cast<std::int32_t>(i % c.n_head_kv);
        attend_tile(c, layer, s, m, head, 0, into, into_sums, scratch(thread));
        for (std::int64_t tile = 1; tile < tile_count(s.rows[m].position + 1); ++tile) {
          attend_tile(c, layer, s, m, head, tile, from, from_sums, scratch(thread));
          for (std::int32_t g = 0; g < group; ++g)
            k_.merge(into[g], into_sums + g * d, from[g], from_sums + g * d, d);
        }
        float* out = &s.a.att[m * size(c.q_dim()) + size(head) * size(group) * size(d)];
        for (std::int32_t g = 0; g < group; ++g) k_.finish(into[g], into_sums + g * d, out + g * d, d);
      }
    });
  }

  cpu::Team team_;
  const cpu::Kernels& k_;
  std::size_t scratch_floats_;
  std::vector<float> scratch_;  // [threads, scratch_floats_]
  std::vector<Partial> parts_;  // [threads, 2, group]
};

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(const Config& config, int n_threads) {
  return std::make_unique<CpuOps>(config, n_threads);
}

}  // namespace ringlm

#include "cpu/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "model/rope.h"

namespace ringlm {
namespace {

using cpu::Partial;

const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// What one thread needs: float32 weight rows of a matmul, or the sums of a group of heads twice.
std::size_t scratch_floats(const Config& c) {
  const std::int32_t widest = std::max({c.n_embd, c.q_dim(), c.n_ff});
  const std::size_t group_sums = size(c.group()) * size(c.head_dim);
  return std::max(cpu::matmul_scratch(widest), 2 * group_sums);
}

float dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return static_cast<float>(sum);
}

class CpuOps final : public Ops {
 public:
  CpuOps(const Config& c, int n_threads)
      : shared_team_(cpu::Team::shared(n_threads > 0 ? n_threads : cpu::default_thread_count())),
        team_(*shared_team_),
        k_(cpu::kernels()),
        rotation_(kv::make_rotation(c.head_dim)),
        rotation_tables_(cpu::rotation_tables(rotation_)),
        scratch_floats_(scratch_floats(c)),
        scratch_(scratch_floats_ * size(team_.size())),
        parts_(2 * size(c.group()) * size(team_.size())) {}

  const char* name() const override { return k_.name; }
  int n_threads() const override { return team_.size(); }

  // Of one row: a state per tile and head.
  std::size_t tile_floats(const Config& c, std::int64_t tiles) const override {
    return size(tiles) * size(c.n_head) * (size(c.head_dim) + sizeof(Partial) / sizeof(float));
  }
  std::size_t scratch_bytes() const override {
    return (scratch_.size() + rotation_tables_.size()) * sizeof(float) + parts_.size() * sizeof(Partial);
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

  // What a query sees is cut into tiles by its position alone. A tile's result does not depend on who
  // computes it, and results are merged in the order of the tiles, so both ways below give the same bits.
  void attend(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) override {
    const auto items = static_cast<std::int64_t>(s.rows.size()) * c.n_head_kv;
    if (s.rows.size() == 1 || items < team_.size()) {
      for (std::size_t m = 0; m < s.rows.size(); ++m) attend_split(c, w, layer, s, m);
    } else {
      attend_whole(c, w, layer, s);
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

  // One tile of KV head `head` for row m.
  void attend_tile(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s, std::size_t m,
                   std::int32_t head, const kv::Tile& tile, Partial* parts, float* sums) {
    const kv::Cache& cache = *s.rows[m].kv;
    const kv::Ring& ring = cache.ring(layer);
    const std::int64_t slot = ring.slot(tile.first);
    const Epoch epoch = epoch_of(cache.layout(), tile.first, s.rows[m].position, tile.pinned);
    const std::size_t q_head = m * size(c.n_head) + size(head) * size(c.group());
    const cpu::TileArgs args{
        (tile.pinned ? s.a.q_pinned : s.a.q).data() + q_head * size(c.head_dim),
        c.group(),
        c.head_dim,
        1.0f / std::sqrt(static_cast<float>(c.head_dim)),
        cache.k(layer, head),
        cache.v(layer, head),
        slot,
        tile.n,
        static_cast<std::int32_t>(std::min<std::int64_t>(tile.n, ring.capacity - slot)),
        ring.pinned,
        centred(w, cache) ? s.a.offsets.data() + q_head * kEpochs + size(epoch) : nullptr,
        kEpochs};
    k_.attend_tile(args, parts, sums);
  }

  // The end of a head: the weighted mean, and values back from their rotation.
  void finish(const kv::Cache& cache, const Partial& part, const float* sum, float* out,
              std::int32_t head_dim) {
    k_.finish(part, sum, out, head_dim);
    if (cache.layout().v_format == KvFormat::Int8) rotate(out, true);
  }

  // Few heads, many positions. Threads take tiles; then each head merges its own.
  void attend_split(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s,
                    std::size_t m) {
    const kv::Cache& cache = *s.rows[m].kv;
    const kv::Tiles tiles(cache.ring(layer), s.rows[m].position);
    const std::size_t states = size(tiles.count()) * size(c.n_head);  // [tiles, n_head]
    auto* parts = reinterpret_cast<Partial*>(s.rows[m].tiles);
    float* sums = s.rows[m].tiles + states * sizeof(Partial) / sizeof(float);
    team_.run([&](int thread) {
      for (std::int64_t i = thread; i < tiles.count() * c.n_head_kv; i += team_.size()) {
        const std::int64_t tile = i / c.n_head_kv;
        const auto head = static_cast<std::int32_t>(i % c.n_head_kv);
        const std::size_t state = size(tile) * size(c.n_head) + size(head) * size(c.group());
        attend_tile(c, w, layer, s, m, head, tiles[tile], parts + state, sums + state * size(c.head_dim));
      }
      team_.barrier();
      for (std::int64_t h = thread; h < c.n_head; h += team_.size()) {
        for (std::int64_t tile = 1; tile < tiles.count(); ++tile) {
          const std::size_t from = size(tile) * size(c.n_head) + size(h);
          k_.merge(parts[h], sums + h * c.head_dim, parts[from], sums + from * size(c.head_dim), c.head_dim);
        }
        finish(cache, parts[h], sums + h * c.head_dim,
               &s.a.att[(m * size(c.n_head) + size(h)) * size(c.head_dim)], c.head_dim);
      }
    });
  }

  // Many rows. A thread takes a row and KV head through all its tiles.
  void attend_whole(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) {
    const std::int32_t group = c.group(), d = c.head_dim;
    const auto items = static_cast<std::int64_t>(s.rows.size()) * c.n_head_kv;
    team_.run([&](int thread) {
      float* into_sums = scratch(thread);
      float* from_sums = into_sums + group * d;
      Partial* into = parts_.data() + 2 * size(group) * size(thread);
      Partial* from = into + group;
      for (std::int64_t i = thread; i < items; i += team_.size()) {
        const std::size_t m = size(i / c.n_head_kv);
        const auto head = static_cast<std::int32_t>(i % c.n_head_kv);
        const kv::Cache& cache = *s.rows[m].kv;
        const kv::Tiles tiles(cache.ring(layer), s.rows[m].position);
        attend_tile(c, w, layer, s, m, head, tiles[0], into, into_sums);
        for (std::int64_t tile = 1; tile < tiles.count(); ++tile) {
          attend_tile(c, w, layer, s, m, head, tiles[tile], from, from_sums);
          for (std::int32_t g = 0; g < group; ++g)
            k_.merge(into[g], into_sums + g * d, from[g], from_sums + g * d, d);
        }
        float* out = &s.a.att[m * size(c.q_dim()) + size(head) * size(group) * size(d)];
        for (std::int32_t g = 0; g < group; ++g) finish(cache, into[g], into_sums + g * d, out + g * d, d);
      }
    });
  }

  const std::shared_ptr<cpu::Team> shared_team_;  // with the other models of the process
  cpu::Team& team_;
  const cpu::Kernels& k_;
  const kv::Rotation rotation_;  // of every INT8 cache of the model
  const std::vector<float> rotation_tables_;
  std::size_t scratch_floats_;
  std::vector<float> scratch_;  // [threads, scratch_floats_]
  std::vector<Partial> parts_;  // [threads, 2, group]
};

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(const Config& config, int n_threads) {
  return std::make_unique<CpuOps>(config, n_threads);
}

}  // namespace ringlm

#include "cpu/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>
#include <vector>

#include "cpu/attention.h"
#include "cpu/kernels.h"
#include "cpu/pack.h"
#include "cpu/team.h"
#include "gguf/types.h"
#include "host/memory.h"
#include "model/rope.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

using cpu::Claims;
using cpu::MatrixView;

const std::uint8_t* u8(const std::byte* p) { return reinterpret_cast<const std::uint8_t*>(p); }
std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::size_t aligned(std::size_t n) { return (n + 63) / 64 * 64; }

std::int32_t widest_input(const Config& c) { return std::max({c.n_embd, c.q_dim(), c.n_ff}); }

// The memory of a thread, in bytes from its beginning: a row after its norm (or a head), the row quantized,
// and what matmul or row_matmul asks for.
struct Scratch {
  std::size_t quantized, product, end;

  explicit Scratch(const Config& c) {
    const std::int32_t widest = std::max(widest_input(c), c.head_dim);
    quantized = aligned(size(widest) * sizeof(float));
    product = quantized + aligned(cpu::act_bytes(widest, 1));
    end = product + aligned(std::max(cpu::staged_bytes(widest), cpu::matmul_scratch(widest) * sizeof(float)));
  }
};

struct alignas(64) Line {
  std::byte bytes[64];
};

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
        packed_(options.pack),
        rotation_(kv::make_rotation(c.head_dim)),
        rotation_tables_(cpu::rotation_tables(rotation_)),
        scratch_at_(c),
        scratch_(scratch_at_.end / sizeof(Line) * size(team_.size())),
        attention_(c, k_, rotation_, rotation_tables_, team_.size()) {
    matrices_.resize(w.n_matrices);
    w.for_each_matrix([&](const Matrix& m) {
      matrices_[m.index] = {m.type, m.rows, m.cols, m.row_bytes, u8(m.data.data())};
    });
    if (packed_) pack(w);
  }

  const char* name() const override { return k_.name; }
  int n_threads() const override { return team_.size(); }

  std::size_t tile_floats(const Config& c, std::int64_t tiles) const override {
    return cpu::Attention::tile_floats(c, tiles);
  }
  std::size_t quantized_bytes(const Config& c, std::int64_t M) const override {
    return packed_ ? cpu::act_bytes(widest_input(c), M) : 0;
  }
  std::size_t packed_bytes() const override {
    std::size_t bytes = 0;
    for (const MatrixView& m : matrices_) {
      if (cpu::can_pack(m.type)) bytes += aligned(m.packed_bytes());
    }
    return bytes;
  }
  bool packed() const override { return packed_; }
  std::size_t scratch_bytes() const override {
    return scratch_.size() * sizeof(Line) + rotation_tables_.size() * sizeof(float) + attention_.bytes() +
           matrices_.size() * sizeof(MatrixView);
  }

  void embed(const Config& c, const Weights& w, const Step& s) override {
    const MatrixView& table = matrices_[w.token_embd.index];
    team_.run([&](int thread) {
      auto* row = reinterpret_cast<std::uint8_t*>(scratch(thread));  // at most 4 bytes an element
      for (std::size_t m = size(thread); m < s.rows.size(); m += size(team_.size())) {
        if (table.packed) cpu::unpack_row(table, s.rows[m].token, row);
        k_.dequantize_row(table.type, table.packed ? row : u8(w.token_embd.row(s.rows[m].token)),
                          &s.a.x[m * size(c.n_embd)], c.n_embd);
      }
    });
  }

  void norm_qkv(const Config& c, const LayerWeights& w, const Step& s) override {
    const Product products[] = {product(w.q, w.q_bias, s.a.q), product(w.k, w.k_bias, s.a.k),
                                product(w.v, w.v_bias, s.a.v)};
    Claims claims = claims_of(products, s.rows.size());
    team_.run([&](int thread) {
      const Input x = normed(c, w.attn_norm, s, products, thread);
      for (std::int64_t begin, end; claims.take(thread, begin, end);)
        multiply(products, x, begin, end, thread);
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
    add_projection(w.out, w.out_bias, s.a.att, s);
  }

  void norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) override {
    const Product gate[] = {product(w.gate, w.gate_bias, s.a.gate)};
    const Product up[] = {product(w.up, w.up_bias, s.a.up)};
    const Product both[] = {gate[0], up[0]};
    Claims claims = claims_of(gate, s.rows.size());
    team_.run([&](int thread) {
      const Input x = normed(c, w.ffn_norm, s, both, thread);
      for (std::int64_t begin, end; claims.take(thread, begin, end);) {
        multiply(gate, x, begin, end, thread);
        multiply(up, x, begin, end, thread);
        const std::int64_t first = begin * cpu::kGroup,
                           last = std::min<std::int64_t>(end * cpu::kGroup, c.n_ff);
        for (std::size_t m = 0; m < s.rows.size(); ++m) {
          const std::size_t at = m * size(c.n_ff) + size(first);
          k_.silu_mul(&s.a.gate[at], &s.a.up[at], last - first);
        }
      }
    });
  }

  void down_residual(const Config&, const LayerWeights& w, const Step& s) override {
    add_projection(w.down, w.down_bias, s.a.gate, s);
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
    Product head = product(w.head, {}, {});
    head.into = s.a.heads.data();
    multiply_all({&head, 1}, s.a.normed, n, s);
  }

 private:
  // The rows of a step as the input of products: M of them, and quantized where a matrix wants that.
  struct Input {
    const float* x;              // [M, cols]
    const std::byte* quantized;  // [act_bytes(cols, M)] or null
    std::size_t M;
  };

  // y [M, rows] (+)= w x + bias, or into a row of its own for every token.
  struct Product {
    const MatrixView* w;
    const float* bias;
    float* y;
    bool add;
    float* const* into;
  };

  Product product(const Matrix& w, const Vector& bias, std::span<float> y) const {
    return {&matrices_[w.index], bias.empty() ? nullptr : bias.data(), y.data(), false, nullptr};
  }

  // The file's matrices in the order of the kernels, by all threads; the file's pages are let go.
  void pack(const Weights& w) {
    const std::size_t bytes = packed_bytes();
    const std::size_t there = host::available_memory();
    if (bytes > there) {
      throw OutOfMemory("the weights need " + host::format_bytes(bytes) +
                        " of memory when they are packed, but only " + host::format_bytes(there) +
                        " is available; without packing (repack=False) they stay in the mapped file");
    }
    region_ = host::Region(bytes, "packed weights", host::Region::Pages::Absent);
    auto* out = reinterpret_cast<std::uint8_t*>(region_.bytes().data());
    w.for_each_matrix([&](const Matrix& matrix) {
      MatrixView& m = matrices_[matrix.index];
      if (!cpu::can_pack(m.type)) return;  // it stays in the file
      Claims claims(m.groups(), 16, team_.size());
      team_.run([&](int thread) {
        for (std::int64_t begin, end; claims.take(thread, begin, end);) {
          cpu::pack(m, m.data, static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end), out);
        }
      });
      m.data = out;
      m.packed = true;
      out += aligned(m.packed_bytes());
      host::drop_pages(matrix.data);
    });
  }

  std::byte* memory(int thread) { return scratch_[size(thread) * scratch_at_.end / sizeof(Line)].bytes; }
  float* scratch(int thread) { return reinterpret_cast<float*>(memory(thread)); }
  std::byte* quantized(int thread) { return memory(thread) + scratch_at_.quantized; }

  void rotate(float* head, bool back) const { k_.rotate(rotation_, rotation_tables_.data(), head, back); }

  // The groups of rows that a thread takes at least, and a helper at a time: some 12 KB of weights for one
  // token, one group for many.
  Claims claims_of(std::span<const Product> products, std::size_t M) const {
    constexpr std::size_t bytes = 12 << 10;
    std::int64_t groups = 0;
    for (const Product& p : products) groups += p.w->groups();
    const std::size_t grain = M == 1 ? bytes / products[0].w->group_bytes() : 1;
    return {groups, std::max<std::int64_t>(1, static_cast<std::int64_t>(grain)), team_.size()};
  }

  bool wants_quantized(std::span<const Product> products) const {
    return std::any_of(products.begin(), products.end(), [](const Product& p) {
      return p.w->packed && gguf::traits(p.w->type).block_size > 1;
    });
  }

  // RMSNorm of every row of the step, and quantized. One row is done by every thread for itself, which is
  // quicker than to wait for another.
  Input normed(const Config& c, const Vector& weight, const Step& s, std::span<const Product> products,
               int thread) {
    const std::size_t M = s.rows.size(), n = size(c.n_embd);
    const bool quantize = wants_quantized(products);
    if (M == 1) {
      float* y = scratch(thread);
      k_.rms_norm(s.a.x.data(), weight.data(), c.norm_eps, y, c.n_embd);
      if (quantize) k_.quantize(y, c.n_embd, quantized(thread), 0, 1);
      return {y, quantize ? quantized(thread) : nullptr, 1};
    }
    std::byte* q = s.a.quantized.data();
    for (std::size_t m = size(thread); m < M; m += size(team_.size())) {
      float* y = &s.a.normed[m * n];
      k_.rms_norm(&s.a.x[m * n], weight.data(), c.norm_eps, y, c.n_embd);
      if (quantize) k_.quantize(y, c.n_embd, q, static_cast<std::int64_t>(m), static_cast<std::int64_t>(M));
    }
    team_.barrier();
    return {s.a.normed.data(), quantize ? q : nullptr, M};
  }

  // x [M, cols], quantized the same way.
  Input input(std::span<const float> x, std::size_t M, const Step& s, std::span<const Product> products,
              int thread) {
    if (!wants_quantized(products)) return {x.data(), nullptr, M};
    const std::int32_t cols = products[0].w->cols;
    if (M == 1) {
      k_.quantize(x.data(), cols, quantized(thread), 0, 1);
      return {x.data(), quantized(thread), 1};
    }
    std::byte* q = s.a.quantized.data();
    for (std::size_t m = size(thread); m < M; m += size(team_.size())) {
      k_.quantize(&x[m * size(cols)], cols, q, static_cast<std::int64_t>(m), static_cast<std::int64_t>(M));
    }
    team_.barrier();
    return {x.data(), q, M};
  }

  void multiply_all(std::span<const Product> products, std::span<const float> x, std::size_t M,
                    const Step& s) {
    Claims claims = claims_of(products, M);
    team_.run([&](int thread) {
      const Input in = input(x, M, s, products, thread);
      for (std::int64_t begin, end; claims.take(thread, begin, end);)
        multiply(products, in, begin, end, thread);
    });
  }

  // x += projection of `from`, plus bias
  void add_projection(const Matrix& w, const Vector& bias, std::span<const float> from, const Step& s) {
    Product p = product(w, bias, s.a.x);
    p.add = true;
    multiply_all({&p, 1}, from, s.rows.size(), s);
  }

  // Groups [begin, end) of all products' rows, counted through.
  void multiply(std::span<const Product> products, const Input& x, std::int64_t begin, std::int64_t end,
                int thread) {
    std::int64_t first = 0;
    for (const Product& p : products) {
      const std::int64_t last = first + p.w->groups();
      const auto from = static_cast<std::int32_t>(std::clamp(begin, first, last) - first);
      const auto to = static_cast<std::int32_t>(std::clamp(end, first, last) - first);
      first = last;
      if (from == to) continue;
      const cpu::MatmulArgs args{*p.w, p.bias, x.x,   x.quantized, static_cast<std::int32_t>(x.M),
                                 p.y,  p.add,  p.into};
      std::byte* product = memory(thread) + scratch_at_.product;
      if (p.w->packed) {
        k_.matmul(args, from, to, product);
      } else {
        k_.row_matmul(args, from * cpu::kGroup, std::min(to * cpu::kGroup, p.w->rows),
                      reinterpret_cast<float*>(product));
      }
    }
  }

  const std::shared_ptr<cpu::Team> shared_team_;  // with the other models of the process
  cpu::Team& team_;
  const cpu::Kernels& k_;
  const bool packed_;
  host::Region region_;               // of the packed matrices
  std::vector<MatrixView> matrices_;  // by Matrix::index, packed or as in the file
  const kv::Rotation rotation_;       // of every INT8 cache of the model
  const std::vector<float> rotation_tables_;
  const Scratch scratch_at_;
  std::vector<Line> scratch_;  // [threads, scratch_at_.end]
  cpu::Attention attention_;
};

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(const Config& config, const Weights& weights, const CpuOptions& options) {
  return std::make_unique<CpuOps>(config, weights, options);
}

}  // namespace ringlm

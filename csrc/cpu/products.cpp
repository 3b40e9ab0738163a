#include "cpu/products.h"

#include <algorithm>

#include "gguf/types.h"
#include "ringlm/error.h"

namespace ringlm::cpu {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
std::size_t aligned(std::size_t n) { return (n + 63) / 64 * 64; }

std::int32_t widest_input(const Config& c) {
  return std::max({c.n_embd, c.q_dim(), c.n_ff, c.n_ff_expert, c.n_ff_shared});
}

}  // namespace

Products::Scratch::Scratch(const Config& c) {
  const std::int32_t widest = std::max(widest_input(c), c.head_dim);
  quantized = aligned(size(widest) * sizeof(float));
  product = quantized + aligned(act_bytes(widest, 1));
  end = product + aligned(std::max(staged_bytes(widest), matmul_scratch(widest) * sizeof(float)));
}

Products::Products(const Config& c, const Weights& w, const Kernels& k, Team& team, bool packs)
    : k_(k),
      team_(team),
      packed_(packs),
      scratch_at_(c),
      scratch_(scratch_at_.end / sizeof(Line) * size(team_.size())) {
  matrices_.resize(w.n_matrices);
  w.for_each_matrix([&](const Matrix& m) {
    matrices_[m.index] = {m.type, m.rows, m.cols, m.row_bytes,
                          reinterpret_cast<const std::uint8_t*>(m.data.data())};
  });
  if (packed_) pack(w);
}

std::size_t Products::packed_bytes() const {
  std::size_t bytes = 0;
  for (const MatrixView& m : matrices_) {
    if (can_pack(m.type)) bytes += aligned(m.packed_bytes());
  }
  return bytes;
}

// With experts the rows of each take run_bytes(): whole tiles, and up to 64 bytes more. A step of one row has
// no two slots in an expert.
std::size_t Products::most_bytes(const Config& c, std::int64_t M) {
  const std::size_t dense = act_bytes(widest_input(c), M);
  if (c.n_expert == 0) return dense;
  const std::int64_t slots = M * c.n_slots();
  const std::int64_t runs = std::min<std::int64_t>(c.n_expert, M * c.n_expert_used) + 1;
  const std::int64_t tokens = slots + (M == 1 ? 0 : runs * (kActTile - 1));
  const std::int32_t widest = std::max({c.n_embd, c.n_ff_expert, c.n_ff_shared});
  return std::max(dense, act_bytes(widest, tokens) + size(runs) * 64);
}

void Products::pack(const Weights& w) {
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
    if (!can_pack(m.type)) return;  // it stays in the file
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

Claims Products::claims(std::int64_t groups, std::size_t group_bytes, std::size_t M) const {
  // What a thread takes at least, and a helper at a time: some 12 KB of weights for one token, one group for
  // many.
  constexpr std::size_t bytes = 12 << 10;
  const std::size_t grain = M == 1 ? bytes / group_bytes : 1;
  return {groups, std::max<std::int64_t>(1, static_cast<std::int64_t>(grain)), team_.size()};
}

Claims Products::claims(std::span<const Product> products, std::size_t M) const {
  std::int64_t groups = 0;
  for (const Product& p : products) groups += p.w->groups();
  return claims(groups, products[0].w->group_bytes(), M);
}

bool Products::want_quantized(std::span<const Product> products) {
  return std::any_of(products.begin(), products.end(),
                     [](const Product& p) { return p.w->packed && gguf::traits(p.w->type).block_size > 1; });
}

Input Products::normed(const Config& c, const Vector& weight, const Step& s,
                       std::span<const Product> products, int thread) {
  const std::size_t M = s.rows.size(), n = size(c.n_embd);
  if (weight.empty()) return input(s.a.x, M, s, products, thread);
  const bool quantize = want_quantized(products);
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

Input Products::input(std::span<const float> x, std::size_t M, const Step& s,
                      std::span<const Product> products, int thread) {
  if (!want_quantized(products)) return {x.data(), nullptr, M};
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

void Products::multiply(std::span<const Product> products, const Input& x, std::int64_t begin,
                        std::int64_t end, int thread) {
  std::int64_t first = 0;
  for (const Product& p : products) {
    const std::int64_t last = first + p.w->groups();
    const auto from = static_cast<std::int32_t>(std::clamp(begin, first, last) - first);
    const auto to = static_cast<std::int32_t>(std::clamp(end, first, last) - first);
    first = last;
    if (from == to) continue;
    const MatmulArgs args{*p.w, p.bias, x.x, x.quantized, static_cast<std::int32_t>(x.M), p.y, p.add, p.into};
    std::byte* product = memory(thread) + scratch_at_.product;
    if (p.w->packed) {
      k_.matmul(args, from, to, product);
    } else {
      k_.row_matmul(args, from * kGroup, std::min(to * kGroup, p.w->rows), reinterpret_cast<float*>(product));
    }
  }
}

}  // namespace ringlm::cpu

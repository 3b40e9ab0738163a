// Each operation launches kernels of launch.h, by way of gemv_store, gemv_gate_up, gemm_of and add_projection
// at the end. Where a step is replayed they launch nothing: Region::finish launches the graph.
#include "cuda/cuda_ops.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "cuda/load.h"
#include "cuda/region.h"
#include "cuda/runtime.h"
#include "ringlm/error.h"

namespace ringlm::cuda {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

constexpr Quantized kNone{};

Quantized from_row(Quantized q, std::int64_t row) {
  const std::int64_t blocks = row * blocks_of(q.cols);
  return {q.digits + blocks * 64, q.scales + blocks, q.squares + blocks, q.cols};
}

Quantized without_squares(Quantized q) {
  q.squares = nullptr;
  return q;
}

void check_config(const Config& c) {
  constexpr std::int32_t kHeads[] = {64, 80, 96, 128, 256};
  if (std::ranges::find(kHeads, c.head_dim) == std::end(kHeads)) {
    throw UnsupportedModelError("the model's heads have " + std::to_string(c.head_dim) +
                                " elements; on a GPU there are 64, 80, 96, 128 and 256. Run it with "
                                "device='cpu'");
  }
  if (c.n_expert > kMostExperts) {
    throw UnsupportedModelError("the model's layers have " + std::to_string(c.n_expert) +
                                " experts; on a GPU there are up to " + std::to_string(kMostExperts) +
                                ". Run it with device='cpu'");
  }
}

class CudaOps final : public Ops, public Device {
 public:
  CudaOps(const Config& c, const Weights& w, const CudaOptions& options)
      : config_(c), weights_(w), options_(options), info_(device_info()), loaded_(load_weights(w)) {}

  const char* name() const override { return "cuda"; }
  int n_threads() const override { return 1; }
  std::size_t tile_floats(const Config&, std::int64_t) const override { return 0; }
  std::size_t quantized_bytes(const Config& c, std::int64_t M) const override {
    return Scratch(c, M, info_.n_sm, nullptr).bytes;
  }
  std::size_t packed_bytes() const override { return loaded_.nbytes; }
  bool packed() const override { return true; }
  std::size_t scratch_bytes() const override { return 0; }
  bool stores(KvFormat format) const override { return format != KvFormat::F32; }

  // ---- Device

  Device* device() override { return this; }
  std::size_t available() const override {
    select_device(info_.index);
    return free_device_memory();
  }
  std::size_t staging_bytes(std::int64_t M) const override { return Region::staging_bytes(config_, M); }
  std::unique_ptr<DeviceRegion> allocate(std::size_t bytes, std::size_t host_bytes, std::int64_t M) override {
    select_device(info_.index);
    auto region =
        std::make_unique<Region>(config_, bytes, host_bytes, M, [this, owner = ::getpid()](Region* gone) {
          if (::getpid() != owner) return;  // a child of fork(): the lock may be held by nobody who is there
          const std::lock_guard lock(mutex_);
          regions_.erase(gone->bytes().data());
        });
    const std::lock_guard lock(mutex_);
    regions_[region->bytes().data()] = region.get();
    return region;
  }
  void copy(std::span<std::byte> to, std::span<const std::byte> from) const override {
    select_device(info_.index);
    const std::lock_guard lock(copying_);
    check(cudaMemcpyAsync(to.data(), from.data(), to.size(), cudaMemcpyDefault, copies_.get()),
          "copying from or to the GPU");
    copies_.synchronize("copying from or to the GPU");
  }

  // ---- a step

  void begin(const Config& c, const Step& s, bool looks) override {
    select_device(info_.index);
    Region& r = region(s);
    r.place(c, info_.n_sm, s);
    r.begin(c, s, looks, options_.graph, [this](const kv::Cache& cache) { return layers_of(cache); });
  }
  void finish(const Config& c, const Step& s) override { region(s).finish(c, s); }
  void abandon(const Step& s) noexcept override { region(s).abandon(); }
  void synchronize(const Step& s) override { region(s).synchronize(config_, s); }

  void embed(const Config& c, const Weights&, const Step& s) override {
    const Range range("embed");
    if (replayed(s)) return;
    const Scratch& to = scratch(s);
    cuda::embed({upload(s).rows, static_cast<int>(rows(s)), loaded_.token_embd, c.embedding_scale,
                 s.a.x.data(), loaded_.layers[0].attn_norm, next(s, to.embd, loaded_.layers[0].attn_norm)},
                stream(s));
  }

  void norm_qkv(const Config& c, const LayerWeights& w, const Step& s) override {
    const Range range("norm_qkv");
    if (replayed(s)) return;
    const DeviceLayer& l = layer(w);
    const Product products[] = {
        {l.q, l.q_bias, s.a.q.data()}, {l.k, l.k_bias, s.a.k.data()}, {l.v, l.v_bias, s.a.v.data()}};
    if (few(s)) return gemv_store(s, products, with_norm(scratch(s).embd, l.attn_norm));
    const Halves x = halves(s, s.a.x.data(), c.n_embd, l.attn_norm);
    for (const Product& p : products) gemm_of(s, p, x);
  }

  void rope_append(const Config& c, const LayerWeights& w, std::int32_t index, const Step& s) override {
    const Range range("rope_append");
    if (replayed(s)) return;
    const DeviceLayer& l = layer(w);
    const Upload up = upload(s);
    const std::int32_t rope = c.rope_of[size(index)];
    for_each_format(s, [&](std::int64_t first, std::int64_t n, const kv::Cache& cache) {
      RopeAppend a{};
      a.rows = up.rows + first, a.M = static_cast<int>(n), a.layer = index;
      a.q = s.a.q.data() + first * c.q_dim(), a.q_pinned = s.a.q_pinned.data() + first * c.q_dim();
      a.k = s.a.k.data() + first * c.kv_dim(), a.v = s.a.v.data() + first * c.kv_dim();
      a.q_norm = l.q_norm, a.k_norm = l.k_norm, a.qk_norm = c.qk_norm, a.norm_eps = c.norm_eps;
      if (rope >= 0) {
        const auto& angles = up.angles[size(rope)];
        a.own = angles.own + first * c.rope_dims, a.pinned = angles.pinned + first * c.rope_dims;
        a.epochs = angles.epochs + first * kEpochs * c.rope_dims;
      }
      a.rope_dims = c.rope_dims, a.pairing = c.rope_pairing;
      a.k_bias = centred(w, cache) ? l.k_bias : nullptr;
      a.offsets = s.a.offsets.data() + first * c.n_head * kEpochs;
      a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
      a.k_format = cache.layout().k_format, a.v_format = cache.layout().v_format;
      a.bad = up.bad + first;
      cuda::rope_append(a, stream(s));
    });
  }

  void attend(const Config& c, const LayerWeights& w, std::int32_t index, const Step& s) override {
    const Range range("attend");
    if (replayed(s)) return;
    const Scratch& to = scratch(s);
    const bool one_text = s.rows.front().kv == s.rows.back().kv;
    for_each_format(s, [&](std::int64_t begin, std::int64_t count, const kv::Cache& cache) {
      const std::int64_t most = few(s) || !one_text ? kMostRows : count;
      for (std::int64_t first = begin; first < begin + count; first += most) {
        const std::int64_t n = std::min(most, begin + count - first);
        Attend a{};
        a.rows = upload(s).rows + first, a.M = static_cast<int>(n), a.layer = index;
        a.q = s.a.q.data() + first * c.q_dim(), a.q_pinned = s.a.q_pinned.data() + first * c.q_dim();
        if (centred(w, cache)) a.offsets = s.a.offsets.data() + first * c.n_head * kEpochs;
        a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
        a.k_format = cache.layout().k_format, a.v_format = cache.layout().v_format;
        a.scale = c.attention_scale, a.softcap = c.attn_softcap;
        a.att = s.a.att.data() + first * c.q_dim();
        a.splits = attend_splits(c, info_.n_sm), a.partial = to.partial, a.arrived = to.arrived;
        if (one_text && !few(s)) {
          prefill_attention(a, stream(s));
          continue;
        }
        if (few(s)) a.out = without_squares(from_row(to.att, first));
        const bool quantizes = few(s) && attend_quantizes(a);
        if (!quantizes) a.out = kNone;
        cuda::attend(a, stream(s));
        if (few(s) && !quantizes) {
          to_quantized({a.att, nullptr, a.M, c.q_dim(), nullptr, 0.0f},
                       without_squares(from_row(to.att, first)), stream(s));
        }
      }
    });
  }

  void out_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    const Range range("out_residual");
    if (replayed(s)) return;
    const DeviceLayer& l = layer(w);
    add_projection(c, {l.out, l.out_bias, nullptr}, without_squares(scratch(s).att), s.a.att.data(),
                   l.attn_post_norm, l.ffn_norm, s);
  }

  void route(const Config& c, const LayerWeights& w, const Step& s) override {
    const Range range("route");
    if (replayed(s)) return;
    const DeviceLayer& l = layer(w);
    const Scratch& to = scratch(s);
    const int M = static_cast<int>(rows(s));
    if (!few(s)) {
      to_quantized({s.a.x.data(), nullptr, M, c.n_embd, l.ffn_norm, c.norm_eps},
                   with_norm(to.embd, l.ffn_norm), stream(s));
    }
    in_groups(s, [&](std::int64_t first, std::int64_t n) {
      const Quantized x = with_norm(from_row(to.embd, first), l.ffn_norm);
      const Product router[] = {{l.router, nullptr, s.a.routing.scores.data() + first * c.n_expert}};
      gemv_store(s, router, x, n);
      if (c.n_ff_shared == 0) return;
      const Product gate[] = {{l.shared_gate, nullptr, to.shared_score + first}};
      gemv_store(s, gate, x, n);
    });
    cuda::route(
        {s.a.routing.scores.data(), c.n_ff_shared > 0 ? to.shared_score : nullptr, M, c.n_expert,
         c.n_expert_used, c.expert_weights_norm, s.a.routing.experts.data(), s.a.routing.weights.data()},
        stream(s));
  }

  void norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) override {
    const Range range("norm_gate_up");
    if (replayed(s)) return;
    const DeviceLayer& l = layer(w);
    const Scratch& to = scratch(s);
    if (!w.experts.empty()) return experts_gate_up(c, l, s);
    if (few(s)) {
      return gemv_gate_up(
          s, gate_up_of(c, l.ff, with_norm(to.embd, l.ffn_norm), rows(s), without_squares(to.ff)),
          s.a.gate.data(), s.a.up.data());
    }
    const Halves x = halves(s, s.a.x.data(), c.n_embd, l.ffn_norm);
    gemm_of(s, {l.ff.gate, l.ff.gate_bias, s.a.gate.data()}, x);
    gemm_of(s, {l.ff.up, l.ff.up_bias, s.a.up.data()}, x);
    gate_up(s.a.gate.data(), s.a.up.data(), static_cast<int>(rows(s)), c.n_ff, c.activation, stream(s));
  }

  void down_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    const Range range("down_residual");
    if (replayed(s)) return;
    const DeviceLayer& l = layer(w);
    const bool last = &l == &loaded_.layers.back();
    const float* next_norm = last ? loaded_.output_norm : (&l + 1)->attn_norm;
    if (!w.experts.empty()) return experts_down(c, l, next_norm, s);
    add_projection(c, {l.ff.down, l.ff.down_bias, nullptr}, without_squares(scratch(s).ff), s.a.gate.data(),
                   l.ffn_post_norm, next_norm, s);
  }

  void norm_head(const Config& c, const Weights&, const Step& s) override {
    const Range range("norm_head");
    if (replayed(s)) return;
    Region& r = region(s);
    const Scratch& to = scratch(s);
    const std::int64_t wanted =
        std::ranges::count_if(s.rows, [](const Row& row) { return row.logits != nullptr; });
    const KeptLogits* const kept = s.rows[0].kept;
    float* const logits = to.logits + (kept ? std::int64_t{kept->row} * c.n_vocab : 0);
    const Product head[] = {{loaded_.head, nullptr, logits}};
    const auto project = [&](std::int64_t n) {
      gemv_store(s, head, with_norm(to.embd, loaded_.output_norm), n, c.logit_scale, c.final_softcap);
    };
    if (few(s) && wanted == rows(s)) {
      project(wanted);
      find_largest(c, s, logits);
      if (r.way == Region::Way::Direct) r.fetch_logits(c, s);  // else finish() does: where to changes
      return;
    }
    std::int64_t done = 0;
    for (std::size_t m = 0; done < wanted;) {
      const std::int64_t n = std::min<std::int64_t>(kMostRows, wanted - done);
      to_quantized({s.a.x.data(), upload(s).wanted + done, static_cast<int>(n), c.n_embd, loaded_.output_norm,
                    c.norm_eps},
                   with_norm(to.embd, loaded_.output_norm), stream(s));
      project(n);
      for (std::int64_t i = 0; i < n; ++i, ++m) {
        while (!s.rows[m].logits) ++m;
        r.fetch_logits(c, i, s.rows[m].logits);
        check_finite(to.logits + i * c.n_vocab, 1, c.n_vocab, upload(s).bad + m, stream(s));
      }
      done += n;
    }
  }

 private:
  // y [M, rows] = w x + bias
  struct Product {
    DeviceMatrix w;
    const float* bias;
    float* y;
  };

  static std::int64_t rows(const Step& s) { return static_cast<std::int64_t>(s.rows.size()); }
  static bool few(const Step& s) { return s.rows.size() <= size(kMostRows); }
  static Region& region(const Step& s) { return static_cast<Region&>(*s.a.region); }
  static Stream stream(const Step& s) { return region(s).stream.get(); }
  static bool replayed(const Step& s) { return region(s).way == Region::Way::Replay; }
  static const Scratch& scratch(const Step& s) { return *region(s).scratch; }
  Upload upload(const Step& s) const { return Upload(config_, rows(s), scratch(s).upload); }
  const DeviceLayer& layer(const LayerWeights& w) const {
    return loaded_.layers[static_cast<std::size_t>(&w - weights_.layers.data())];
  }

  // The input of a product behind a norm, or not.
  static Quantized with_norm(Quantized x, const float* norm) { return norm ? x : without_squares(x); }
  // Where a kernel puts the next input; nowhere in a prefill, which has halves.
  static Quantized next(const Step& s, Quantized x, const float* norm) {
    return few(s) ? with_norm(x, norm) : kNone;
  }

  // The rings of a session, which may be another than the step's own.
  const KvLayer* layers_of(const kv::Cache& cache) {
    Region* owner;
    {
      const std::lock_guard lock(mutex_);
      owner = regions_.at(cache.bytes().data());
    }
    return owner->layers(cache);
  }

  // f(first, n, cache) for runs of rows whose keys and values have the same formats.
  template <class F>
  static void for_each_format(const Step& s, F f) {
    const auto formats = [&](std::size_t m) {
      const kv::Layout& l = s.rows[m].kv->layout();
      return std::pair(l.k_format, l.v_format);
    };
    for (std::size_t first = 0, m = 1; m <= s.rows.size(); ++m) {
      if (m < s.rows.size() && formats(m) == formats(first)) continue;
      f(static_cast<std::int64_t>(first), static_cast<std::int64_t>(m - first), *s.rows[first].kv);
      first = m;
    }
  }

  // f(first, n) for rows as many as gemv takes at a time.
  template <class F>
  static void in_groups(const Step& s, F f) {
    for (std::int64_t first = 0; first < rows(s); first += kMostRows) {
      f(first, std::min<std::int64_t>(kMostRows, rows(s) - first));
    }
  }

  // Products of one input; those of one type that follow one another in one launch.
  void gemv_store(const Step& s, std::span<const Product> products, const Quantized& x,
                  std::optional<std::int64_t> M = {}, float scale = 1.0f, float softcap = 0.0f) const {
    for (std::size_t first = 0; first < products.size();) {
      Gemv a{};
      a.x = x, a.M = static_cast<int>(M.value_or(rows(s))), a.norm_eps = config_.norm_eps;
      a.end = End::Store, a.scale = scale, a.softcap = softcap;
      for (; first < products.size(); ++first, ++a.n) {
        const Product& p = products[first];
        if (a.n > 0 && p.w.type != a.w[0].type) break;
        a.w[a.n] = p.w, a.bias[a.n] = p.bias, a.y[a.n] = p.y;
      }
      gemv(a, stream(s));
    }
  }

  Gemv gate_up_of(const Config& c, const DeviceNetwork& n, const Quantized& x, std::int64_t M,
                  const Quantized& to) const {
    Gemv a{};
    a.w[0] = n.gate, a.w[1] = n.up, a.n = 2;
    a.bias[0] = n.gate_bias, a.bias[1] = n.up_bias;
    a.x = x, a.M = static_cast<int>(M), a.norm_eps = c.norm_eps;
    a.end = End::GateUp, a.scale = 1.0f, a.activation = c.activation, a.next = to;
    return a;
  }

  // gate, up: where they go in float32, if they have to.
  void gemv_gate_up(const Step& s, Gemv a, float* gate, float* up) const {
    if (a.w[0].type == a.w[1].type) {
      if (region(s).looks) a.y[0] = gate;
      return gemv(a, stream(s));
    }
    Gemv one = a;
    one.end = End::Store, one.n = 1, one.y[0] = gate;
    gemv(one, stream(s));
    one.w[0] = a.w[1], one.bias[0] = a.bias[1], one.y[0] = up;
    gemv(one, stream(s));
    const int n = a.experts ? a.M * a.slots : a.M, n_ff = a.w[0].rows;
    gate_up(gate, up, n, n_ff, a.activation, stream(s));
    to_quantized({gate, nullptr, n, n_ff, nullptr, 0.0f}, a.next, stream(s));
  }

  // Rows of activations as the input of gemm, after a norm where there is one.
  Halves halves(const Step& s, const float* x, std::int32_t cols, const float* norm) const {
    const Scratch& to = scratch(s);
    const Halves h{to.halves, to.half_steps, cols};
    to_halves({x, nullptr, static_cast<int>(rows(s)), cols, norm, config_.norm_eps}, h, stream(s));
    return h;
  }

  void gemm_of(const Step& s, const Product& p, const Halves& x, bool add = false, float scale = 1.0f) const {
    gemm({p.w, x, static_cast<int>(rows(s)), p.bias, p.y, add, scale}, stream(s));
  }

  // x += scale * norm(projection, plus bias), and the input of what follows. from: the same as `x`, float32.
  void add_projection(const Config& c, Product p, const Quantized& x, const float* from,
                      const float* post_norm, const float* next_norm, const Step& s) const {
    const Quantized to = next(s, scratch(s).embd, next_norm);
    if (few(s) && !post_norm) {
      Gemv a{};
      a.w[0] = p.w, a.bias[0] = p.bias, a.n = 1;
      a.x = x, a.M = static_cast<int>(rows(s)), a.norm_eps = c.norm_eps;
      a.end = End::Residual, a.scale = c.residual_scale, a.residual = s.a.x.data();
      a.next_norm = next_norm, a.next = to;
      return gemv(a, stream(s));
    }
    p.y = post_norm ? s.a.normed.data() : s.a.x.data();
    if (few(s)) {
      const Product one[] = {p};
      gemv_store(s, one, x);
    } else {
      const Halves h = halves(s, from, p.w.cols, nullptr);
      gemm_of(s, p, h, !post_norm, post_norm ? 1.0f : c.residual_scale);
    }
    if (post_norm) add(c, post_norm, next_norm, to, s);
  }

  // x += scale * norm(Activations::normed)
  void add(const Config& c, const float* norm, const float* next_norm, const Quantized& to,
           const Step& s) const {
    add_normed({s.a.x.data(), s.a.normed.data(), norm, c.residual_scale, c.norm_eps,
                static_cast<int>(rows(s)), c.n_embd, next_norm, to},
               stream(s));
  }

  void experts_gate_up(const Config& c, const DeviceLayer& l, const Step& s) const {
    const Scratch& to = scratch(s);
    in_groups(s, [&](std::int64_t first, std::int64_t n) {
      const Quantized x = with_norm(from_row(to.embd, first), l.ffn_norm);
      const std::int64_t slot = first * c.n_expert_used;
      Gemv a = gate_up_of(c, l.experts, x, n, without_squares(from_row(to.slots, slot)));
      a.experts = s.a.routing.experts.data() + slot, a.slots = c.n_expert_used;
      gemv_gate_up(s, a, s.a.gate.data() + slot * c.n_ff_expert, s.a.up.data() + slot * c.n_ff_expert);
      if (c.n_ff_shared == 0) return;
      const std::int64_t at = rows(s) * c.n_expert_used * c.n_ff_expert + first * c.n_ff_shared;
      gemv_gate_up(s, gate_up_of(c, l.shared, x, n, without_squares(from_row(to.shared, first))),
                   s.a.gate.data() + at, s.a.up.data() + at);
    });
  }

  void experts_down(const Config& c, const DeviceLayer& l, const float* next_norm, const Step& s) const {
    const Scratch& from = scratch(s);
    float* const of_experts = s.a.expert_x.data();
    float* const of_shared = c.n_ff_shared > 0 ? of_experts + rows(s) * c.n_expert_used * c.n_embd : nullptr;
    in_groups(s, [&](std::int64_t first, std::int64_t n) {
      const std::int64_t slot = first * c.n_expert_used;
      Gemv a{};
      a.w[0] = l.experts.down, a.bias[0] = l.experts.down_bias, a.n = 1;
      a.x = without_squares(from_row(from.slots, slot)), a.M = static_cast<int>(n);
      a.end = End::Store, a.scale = 1.0f, a.y[0] = of_experts + slot * c.n_embd;
      a.experts = s.a.routing.experts.data() + slot, a.slots = c.n_expert_used, a.input_by_slot = true;
      gemv(a, stream(s));
      if (!of_shared) return;
      const Product shared[] = {{l.shared.down, l.shared.down_bias, of_shared + first * c.n_embd}};
      gemv_store(s, shared, without_squares(from_row(from.shared, first)), n);
    });
    mix_experts(of_experts, of_shared, s.a.routing.weights.data(), static_cast<int>(rows(s)), c.n_expert_used,
                c.n_embd, s.a.normed.data(), stream(s));
    add(c, l.ffn_post_norm, next_norm, next(s, from.embd, next_norm), s);
  }

  // The largest logits of every row, and marks for rows with one that is not finite.
  void find_largest(const Config& c, const Step& s, const float* logits) const {
    const Scratch& to = scratch(s);
    TopK a{};
    a.logits = logits, a.M = static_cast<int>(rows(s)), a.n_vocab = c.n_vocab;
    a.k = s.rows[0].kept ? kTopLogits : 1;
    a.out = to.largest, a.scratch = to.top_k, a.arrived = to.arrived + kMostRows * c.n_head_kv;
    a.bad = upload(s).bad;
    top_k(a, stream(s));
  }

  const Config& config_;
  const Weights& weights_;
  const CudaOptions options_;
  const DeviceInfo info_;
  const DeviceWeights loaded_;
  StreamHandle copies_;
  mutable std::mutex copying_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, Region*> regions_;  // by the beginning of their memory, where their K/V rows are
};

}  // namespace

std::unique_ptr<Ops> make_cuda_ops(const Config& config, const Weights& weights, const CudaOptions& options) {
  check_config(config);
  use_device(0);
  return std::make_unique<CudaOps>(config, weights, options);
}

}  // namespace ringlm::cuda

#include "cuda/region.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ringlm::cuda {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

Quantized take_quantized(Places& places, std::int64_t M, std::int32_t cols) {
  return {places.take<std::int8_t>(Quantized::digit_bytes(cols, M)),
          places.take<float4>(Quantized::scale_bytes(cols, M) / sizeof(float4)),
          places.take<float>(Quantized::square_bytes(cols, M) / sizeof(float)), cols};
}

// What a captured step depends on besides its upload: M, the formats of its rows, and where logits stay.
std::uint64_t key_of(const Step& s) {
  const KeptLogits* kept = s.rows[0].kept;
  std::uint64_t key = kept ? 2u + static_cast<unsigned>(kept->row) : 1u;
  for (const Row& row : s.rows) {
    const kv::Layout& l = row.kv->layout();
    key = key * 4 + (l.k_format == KvFormat::Int8) * 2u + (l.v_format == KvFormat::Int8);
  }
  return key;
}

}  // namespace

Upload::Upload(const Config& c, std::int64_t M, std::uint8_t* base) {
  Places places(base);
  rows = places.take<DeviceRow>(size(M));
  wanted = places.take<std::int32_t>(size(M));
  bad = places.take<std::uint32_t>(size(M));
  const std::size_t n = size(M) * size(c.rope_dims);
  for (std::size_t rope = 0; rope < c.ropes.size(); ++rope) {
    angles[rope] = {places.take<float>(n), places.take<float>(n), places.take<float>(n * kEpochs)};
  }
  bytes = places.used();
}

int attend_splits(const Config& c, int n_sm) {
  // About four blocks on every multiprocessor: enough loads under way to fill the memory's bandwidth.
  return std::max(1, (4 * n_sm + c.n_head_kv - 1) / c.n_head_kv);
}

Scratch::Scratch(const Config& c, std::int64_t M, int n_sm, std::uint8_t* base) {
  Places places(base);
  const std::int64_t few = std::min<std::int64_t>(M, kMostRows);
  const bool experts = c.n_expert > 0;
  upload = places.take<std::uint8_t>(Upload(c, M, nullptr).bytes);
  embd = take_quantized(places, experts ? M : few, c.n_embd);
  att = take_quantized(places, few, c.q_dim());
  ff = take_quantized(places, few, c.n_ff);
  slots = take_quantized(places, experts ? M * c.n_expert_used : 0, c.n_ff_expert);
  shared = take_quantized(places, c.n_ff_shared > 0 ? M : 0, c.n_ff_shared);
  shared_score = places.take<float>(c.n_ff_shared > 0 ? size(M) : 0);
  const std::int32_t widest = std::max({c.n_embd, c.q_dim(), c.n_ff});
  halves = places.take<half>(M > kMostRows ? size(M) * size(blocks_of(widest)) * size(kBlock) : 0);
  half_steps = places.take<float>(M > kMostRows ? size(M) : 0);
  Attend a{};
  a.M = static_cast<int>(few), a.splits = attend_splits(c, n_sm);
  a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
  partial = places.take<float>(attend_partial_floats(a));
  arrived = places.take<unsigned>(size(kMostRows) * size(c.n_head_kv + 1));
  logits = places.take<float>(std::max(size(few), std::size_t{2}) * size(c.n_vocab));
  largest = places.take<TopLogits>(size(few));
  TopK heads{};
  heads.M = static_cast<int>(few), heads.n_vocab = c.n_vocab, heads.k = kTopLogits;
  top_k = places.take<std::byte>(top_k_scratch_bytes(heads));
  bytes = places.used();
}

Region::Region(const Config& c, std::size_t bytes, std::size_t host_bytes, std::int64_t M,
               std::function<void(Region*)> gone)
    : M_(M),
      n_vocab_(size(c.n_vocab)),
      gone_(std::move(gone)),
      memory_(bytes, "a session"),
      layers_(size(c.n_layer) * sizeof(KvLayer), "a session"),
      host_(host_bytes, "a session"),
      staging_(Upload(c, M, nullptr).bytes, "a session"),
      bad_(size(M) * sizeof(std::uint32_t), "a session"),
      largest_(sizeof(TopLogits), "a session") {
  check(cudaMemsetAsync(memory_.data(), 0, bytes, stream.get()), "clearing the memory of a session");
  std::ranges::fill(host_.span(), std::uint8_t{0});
  stream.synchronize("clearing the memory of a session");
}

Region::~Region() {
  if (gone_) gone_(this);
}

const KvLayer* Region::layers(const kv::Cache& cache) {
  if (has_layers_) return layers_.as<KvLayer>();
  std::vector<KvLayer> all(layers_.size() / sizeof(KvLayer));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto layer = static_cast<std::int32_t>(i);
    const kv::Rows k = cache.k(layer, 0), v = cache.v(layer, 0);
    const kv::Ring& ring = cache.ring(layer);
    all[i] = {k.data, v.data, k.scales, v.scales, ring.visible, ring.pinned, ring.capacity};
  }
  check(cudaMemcpyAsync(layers_.data(), all.data(), layers_.size(), cudaMemcpyHostToDevice, stream.get()),
        "describing a session's rings");
  stream.synchronize("describing a session's rings");
  has_layers_ = true;
  return layers_.as<KvLayer>();
}

void Region::place(const Config& c, int n_sm, const Step& s) {
  if (!scratch) scratch.emplace(c, M_, n_sm, reinterpret_cast<std::uint8_t*>(s.a.quantized.data()));
}

void Region::upload(const Config& c, const Step& s, const LayersOf& layers_of) {
  const std::size_t M = s.rows.size(), n = M * size(c.rope_dims);
  const Upload up(c, static_cast<std::int64_t>(M), staging_.data());
  std::size_t wanted = 0;
  for (std::size_t m = 0; m < M; ++m) {
    const Row& row = s.rows[m];
    const bool same = m > 0 && s.rows[m - 1].kv == row.kv;
    up.rows[m] = {row.position, row.kv->layout().epoch(), same ? up.rows[m - 1].layers : layers_of(*row.kv),
                  row.token};
    if (row.logits) up.wanted[wanted++] = static_cast<std::int32_t>(m);
    up.bad[m] = 0;
  }
  for (std::size_t rope = 0; rope < c.ropes.size(); ++rope) {
    const Angles& from = s.a.angles[rope];
    std::copy_n(from.own.data(), n, up.angles[rope].own);
    std::copy_n(from.pinned.data(), n, up.angles[rope].pinned);
    std::copy_n(from.epochs.data(), n * kEpochs, up.angles[rope].epochs);
  }
}

void Region::begin(const Config& c, const Step& s, bool somebody_looks, bool graph,
                   const LayersOf& layers_of) {
  way = Way::Direct;
  looks = somebody_looks;

  upload(c, s, layers_of);
  const bool all = std::ranges::all_of(s.rows, [](const Row& row) { return row.logits != nullptr; });
  if (graph && !looks && all && s.rows.size() <= size(kMostRows)) {
    key_ = key_of(s);
    way = graphs_.contains(key_) ? Way::Replay : Way::Capture;
  }
  if (way == Way::Replay) return;
  if (way == Way::Capture) Graph::begin(stream.get());
  const std::size_t bytes = Upload(c, static_cast<std::int64_t>(s.rows.size()), nullptr).bytes;
  check(cudaMemcpyAsync(scratch->upload, staging_.data(), bytes, cudaMemcpyHostToDevice, stream.get()),
        "uploading a step");
}

void Region::finish(const Config& c, const Step& s) {
  if (way != Way::Replay) {
    const Upload up(c, static_cast<std::int64_t>(s.rows.size()), scratch->upload);
    check_finite(s.a.x.data(), static_cast<int>(s.rows.size()), c.n_embd, up.bad, stream.get());
    fetch_results(c, s);
  }
  if (way == Way::Capture) {
    way = Way::Direct;  // the capture ends here, well or not
    Graph captured;
    captured.end(stream.get());
    graphs_[key_] = std::move(captured);
    way = Way::Replay;
  }
  if (way == Way::Replay) {
    graphs_.at(key_).launch(stream.get());
    fetch_logits(c, s);
  }
  stream.synchronize("a step");
  way = Way::Direct;
  take_results(s);
}

// Nothing of the step may still run when another one begins, of this session or of one that shares its rows.
void Region::abandon() noexcept {
  if (way == Way::Capture) Graph::abandon(stream.get());
  way = Way::Direct;
  try {
    stream.synchronize("a step");
  } catch (...) {  // what is wrong with the device, the next step will say
  }
}

void Region::synchronize(const Config& c, const Step& s) {
  fetch_results(c, s);
  stream.synchronize("a step");
  take_results(s);
}

void Region::fetch_logits(const Config& c, std::int64_t from, float* to) {
  check(cudaMemcpyAsync(to, scratch->logits + from * c.n_vocab, size(c.n_vocab) * sizeof(float),
                        cudaMemcpyDeviceToHost, stream.get()),
        "reading logits");
}

void Region::fetch_logits(const Config& c, const Step& s) {
  if (s.rows[0].kept) return;
  for (std::size_t m = 0; m < s.rows.size(); ++m)
    fetch_logits(c, static_cast<std::int64_t>(m), s.rows[m].logits);
}

void Region::fetch_results(const Config& c, const Step& s) {
  const Upload up(c, static_cast<std::int64_t>(s.rows.size()), scratch->upload);
  check(cudaMemcpyAsync(bad_.data(), up.bad, s.rows.size() * sizeof(std::uint32_t), cudaMemcpyDeviceToHost,
                        stream.get()),
        "reading a step's marks");
  if (!s.rows[0].kept) return;
  check(cudaMemcpyAsync(largest_.data(), scratch->largest, sizeof(TopLogits), cudaMemcpyDeviceToHost,
                        stream.get()),
        "reading the largest logits");
}

void Region::take_results(const Step& s) const {
  for (std::size_t m = 0; m < s.rows.size(); ++m) s.bad[m] |= bad_.as<std::uint32_t>()[m] != 0 ? 1 : 0;
  if (s.rows[0].kept) s.rows[0].kept->largest = *largest_.as<TopLogits>();
}

std::size_t Region::staging_bytes(const Config& c, std::int64_t M) {
  return Upload(c, M, nullptr).bytes + size(M) * sizeof(std::uint32_t) + sizeof(TopLogits);
}

}  // namespace ringlm::cuda

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

int attend_splits(const Config& c, std::int64_t M, int n_sm) {
  // About four blocks on every multiprocessor: enough loads under way to fill the memory's bandwidth.
  const std::int64_t blocks = 4 * std::int64_t{n_sm}, there = c.n_head_kv * M;
  return static_cast<int>(std::max<std::int64_t>(1, (blocks + there - 1) / there));
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
  std::size_t floats = 0;
  for (std::int64_t m = 1; m <= few; ++m) {
    Attend a{};
    a.M = static_cast<int>(m);
    a.n_head = c.n_head, a.n_head_kv = c.n_head_kv, a.head_dim = c.head_dim;
    a.splits = attend_splits(c, m, n_sm);
    floats = std::max(floats, attend_partial_floats(a));
  }
  partial = places.take<float>(floats);
  arrived = places.take<unsigned>(size(kMostRows) * size(c.n_head_kv + 1));
  logits = places.take<float>(size(few) * size(c.n_vocab));
  candidates = places.take<Candidates>(size(few));
  TopK heads{};
  heads.M = static_cast<int>(few), heads.n_vocab = c.n_vocab, heads.k = kTopK;
  top_k = places.take<std::byte>(top_k_scratch_bytes(heads));
  bytes = places.used();
}

Region::Region(const Config& c, std::size_t bytes, std::size_t host_bytes, std::int64_t M_,
               std::function<void(Region*)> gone)
    : M(M_),
      gone_(std::move(gone)),
      memory_(bytes, "a session"),
      layers_(size(c.n_layer) * sizeof(KvLayer), "a session"),
      host_(host_bytes, "a session"),
      staging_(Upload(c, M, nullptr).bytes, "a session"),
      bad_(size(M) * sizeof(std::uint32_t), "a session") {
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

void Region::begin() {
  if (way == Way::Capture) Graph::abandon(stream.get());
  if (busy_) stream.synchronize("a step");
  way = Way::Direct;
  busy_ = true;
}

void Region::capture() {
  way = Way::Capture;
  Graph::begin(stream.get());
}

void Region::end_capture() {
  way = Way::Replay;
  Graph graph;
  graph.end(stream.get());
  graphs[key] = std::move(graph);
}

void Region::launch() { graphs.at(key).launch(stream.get()); }

void Region::wait() {
  stream.synchronize("a step");
  busy_ = false;
  way = Way::Direct;
}

std::size_t Region::staging_bytes(const Config& c, std::int64_t M) {
  return Upload(c, M, nullptr).bytes + size(M) * sizeof(std::uint32_t);
}

}  // namespace ringlm::cuda

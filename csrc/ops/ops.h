// The eight operations that a decoder consists of, and one more for experts. decoder/decoder.cpp calls them
// in a straight line; every backend implements exactly these: ops/reference.cpp to be read, cpu/ and cuda/ to
// be fast.
//
// Every operation takes the M rows of a step: M = 1 is decode, M > 1 a prefill chunk. The residual stream and
// all activations are float32, row-major, tokens outermost.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kv/cache.h"
#include "model/rope.h"
#include "model/weights.h"
#include "ops/device.h"
#include "ringlm/config.h"

namespace ringlm {

// One token on its way through the layers. Rows of a step that share a cache are in ascending position; rows
// of different sessions never meet.
struct Row {
  std::int32_t token;
  std::int64_t position;
  const kv::Cache* kv;
  float* logits;        // [n_vocab], or null where nobody asks
  float* tiles;         // backend scratch of attend: [Ops::tile_floats] of the row's session
  std::int32_t regime;  // of its angles (model/rope.h)
  // On a device, in some steps of one row: logits, which is not null, is not written to; they stay there.
  KeptLogits* kept = nullptr;
};

// Which epochs a query can meet, for the tables and offsets below.
enum Epoch { kOwn, kPrevious, kOfPinned, kEpochs };

// (cos, sin) of every pair. In the epochs' tables both are 0 for pairs that turn too fast to be centred.
struct Angles {
  std::span<float> own;     // [M, rope_dims]           at the row's position
  std::span<float> pinned;  // [M, rope_dims]           at min(position, n_ctx - 1)
  std::span<float> epochs;  // [M, kEpochs, rope_dims]  in the middle of each epoch
};
constexpr std::size_t kMostRopes = 2;  // Config::ropes

// Which experts the tokens of a step go to. A slot is one token in one expert; those of an expert follow one
// another, and those of the shared one, of every row in turn, are the last M.
struct Routing {
  std::span<float> scores;          // [M, n_expert]       of the router
  std::span<std::int32_t> experts;  // [M, n_expert_used]  the largest weight first
  std::span<float> weights;         // [M, n_slots]        in the same order, the shared one's last
  std::span<std::int32_t> slots;    // [M, n_slots]        where each of them is
  std::span<std::int32_t> first;    // [n_expert + 1]      the first slot of each expert, and the end
};

// The buffers of a step, allocated once for the largest M that the session will ever use.
struct Activations {
  std::span<float> x;       // [M, n_embd]             the residual stream
  std::span<float> normed;  // [M, n_embd]             x after a norm
  std::span<float> q;       // [M, n_head, head_dim]
  std::span<float> k;       // [M, n_head_kv, head_dim]
  std::span<float> v;       // [M, n_head_kv, head_dim]
  std::span<float> att;     // [M, n_head, head_dim]   attention output
  std::span<float> gate;    // [M, n_ff]               gate, then activation(gate) * up; with experts
  std::span<float> up;  // [M, n_ff]               by slot: [M n_expert_used, n_ff_expert], [M, n_ff_shared]
  std::span<float> expert_x;  // [M n_slots, n_embd]     by slot: what experts are given, then what they give
  Routing routing;
  std::span<float*> heads;         // [M] backend scratch of norm_head
  std::span<std::byte> quantized;  // [Ops::quantized_bytes] backend scratch: the input of a projection
  // The second query, which scores the pinned rows: turned to min(position, n_ctx - 1) instead, so that the
  // pinned rows stand directly before the oldest moving one (attention sinks, arXiv:2309.17453).
  std::span<float> q_pinned;  // [M, n_head, head_dim]
  std::array<Angles, kMostRopes> angles;
  std::span<float> offsets;        // [M, n_head, kEpochs]     q . c_e, which scores of centred keys get back
  DeviceRegion* region = nullptr;  // what all but the angles and `heads` lies in, on a device
};

struct Step {
  std::span<const Row> rows;  // [M]
  Activations& a;
  // [M] becomes 1 for rows with a key or value that does not fit the K/V format, or with a number in x or
  // the logits that is not finite.
  std::span<std::uint8_t> bad;
};

class Ops {
 public:
  virtual ~Ops() = default;

  virtual const char* name() const = 0;  // "reference", "cuda", or the instruction set
  virtual int n_threads() const = 0;

  // Floats that attend() needs in Row::tiles when a query sees up to `tiles` tiles.
  virtual std::size_t tile_floats(const Config& config, std::int64_t tiles) const = 0;

  // Bytes of Activations::quantized for a step of up to M rows.
  virtual std::size_t quantized_bytes(const Config& config, std::int64_t M) const = 0;

  // Bytes of the matrices in the backend's own order, and whether it holds them in that: the file's pages are
  // not needed then.
  virtual std::size_t packed_bytes() const = 0;
  virtual bool packed() const = 0;

  // Bytes of scratch that all sessions of the model share.
  virtual std::size_t scratch_bytes() const = 0;

  // Null for a backend that computes in the process's memory.
  virtual Device* device() { return nullptr; }
  virtual bool stores(KvFormat) const { return true; }

  // Around the operations of a step. The rows and their angles are there when it begins; when it is over,
  // the logits or Row::kept are, and s.bad is filled in. A device may do the whole work at the end, unless
  // somebody `looks` at numbers or times between two operations.
  virtual void begin(const Config&, const Step& s, bool looks) = 0;
  virtual void finish(const Config&, const Step& s) = 0;
  virtual void abandon(const Step&) noexcept {}  // instead of finish, when something was thrown
  virtual void synchronize(const Step&) {}       // until what was begun is done

  // 1  x = rows of the embedding, scaled
  virtual void embed(const Config&, const Weights&, const Step&) = 0;

  // 2  normed = RMSNorm(x);  q, k, v = projections of it, plus bias. Where the model has no such norm, of x
  virtual void norm_qkv(const Config&, const LayerWeights&, const Step&) = 0;

  // 3  norm of q and k; turn q (both ways) and k to their positions; write k and v into the cache, and mark
  //    rows whose key or value does not fit: an infinite key can give a query the score -infinity, which
  //    hides it from this step and from its logits, but not from later ones
  virtual void rope_append(const Config&, const LayerWeights&, std::int32_t layer, const Step&) = 0;

  // 4  att = softmax(scale q k^T, soft cap) v over every position that the row's query sees
  virtual void attend(const Config&, const LayerWeights&, std::int32_t layer, const Step&) = 0;

  // 5  x += scale * RMSNorm(projection of att, plus bias), the norm where the model has one
  virtual void out_residual(const Config&, const LayerWeights&, const Step&) = 0;

  // In layers that have experts, before 6 and timed with it: normed = RMSNorm(x), the experts of each row
  // and their weights.
  virtual void route(const Config&, const LayerWeights&, const Step&) = 0;

  // 6  normed = RMSNorm(x);  gate = activation(gate projection) * up projection. With experts: of the slots.
  virtual void norm_gate_up(const Config&, const LayerWeights&, const Step&) = 0;

  // 7  x += scale * RMSNorm(projection of gate, plus bias), the norm where the model has one. With experts:
  //    of the weighted sum over a row's slots.
  virtual void down_residual(const Config&, const LayerWeights&, const Step&) = 0;

  // 8  logits = head(RMSNorm(x)), scale and soft cap, of the rows that have some
  virtual void norm_head(const Config&, const Weights&, const Step&) = 0;
};

// The angles of a layer; null where it turns nothing.
inline const Angles* angles_of(const Config& c, std::int32_t layer, const Step& s) {
  const std::int32_t rope = c.rope_of[static_cast<std::size_t>(layer)];
  return rope < 0 ? nullptr : &s.a.angles[static_cast<std::size_t>(rope)];
}

// Whether keys of this layer and cache are centred (kv/cache.h).
inline bool centred(const LayerWeights& w, const kv::Cache& cache) {
  return w.keys_have_offset && cache.layout().k_format == KvFormat::Int8;
}

// The slots of one expert in a step.
struct ExpertRun {
  const FeedForward& network;
  std::int64_t first, n;  // slots
  std::int32_t n_ff;
  std::size_t gate;  // where its rows [n, n_ff] of Activations::gate and up begin
};

// Calls f with the run of every expert that has slots, in their order.
template <class F>
void for_each_run(const Config& c, const LayerWeights& w, const Step& s, F f) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const std::span<const std::int32_t> first = s.a.routing.first;
  for (std::size_t e = 0; e < size(c.n_expert); ++e) {
    if (first[e] == first[e + 1]) continue;
    f(ExpertRun{w.experts[e], first[e], first[e + 1] - first[e], c.n_ff_expert,
                size(first[e]) * size(c.n_ff_expert)});
  }
  if (c.n_ff_shared == 0) return;
  const std::int32_t end = first[size(c.n_expert)];
  f(ExpertRun{w.experts.back(), end, static_cast<std::int64_t>(s.rows.size()), c.n_ff_shared,
              size(end) * size(c.n_ff_expert)});
}

// The weights and experts of row m, from the scores of the router [n_expert], and, with `shared`, that of the
// shared expert. The n_expert_used of the largest probability, of equal ones the first.
void choose_experts(const Config& c, const Step& s, std::size_t m, std::span<const float> scores,
                    float shared);

// What rope_append and finish do on the host: checks.cpp.
void mark_unfit_rows(const Config& c, const Step& s);
void mark_rows_not_finite(const Config& c, const Step& s);

// The slots, from the experts of all rows.
void assign_slots(const Config& c, const Step& s);

// The epoch of the key at t, for a query at p that sees it.
inline Epoch epoch_of(const kv::Layout& l, std::int64_t t, std::int64_t p, bool pinned) {
  return pinned ? kOfPinned : t / l.epoch() == p / l.epoch() ? kOwn : kPrevious;
}

// c_e of KV head `head`. out [head_dim], table [rope_dims] of row m and epoch e.
inline void centre(const Config& c, const LayerWeights& w, std::int32_t head, std::span<const float> table,
                   std::span<float> out) {
  const auto d = static_cast<std::size_t>(c.head_dim);
  const auto first = w.k_bias.begin() + static_cast<std::ptrdiff_t>(head) * c.head_dim;
  std::copy(first, first + c.head_dim, out.begin());
  rope_apply(out.first(d), table, c.rope_pairing);
}

}  // namespace ringlm

// The eight operations that a decoder consists of. decoder/decoder.cpp calls them in a straight line; every
// backend implements exactly these: ops/reference.cpp to be read, cpu/ to be fast.
//
// Every operation takes the M rows of a step: M = 1 is decode, M > 1 a prefill chunk. The residual stream and
// all activations are float32, row-major, tokens outermost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kv/cache.h"
#include "model/rope.h"
#include "model/weights.h"
#include "ringlm/config.h"

namespace ringlm {

// One token on its way through the layers. Rows of a step that share a cache are in ascending position; rows
// of different sessions never meet.
struct Row {
  std::int32_t token;
  std::int64_t position;
  const kv::Cache* kv;
  float* logits;  // [n_vocab], or null where nobody asks
  float* tiles;   // backend scratch of attend: [Ops::tile_floats] of the row's session
};

// Which epochs a query can meet, for the tables and offsets below.
enum Epoch { kOwn, kPrevious, kOfPinned, kEpochs };

// The buffers of a step, allocated once for the largest M that the session will ever use.
struct Activations {
  std::span<float> x;              // [M, n_embd]             the residual stream
  std::span<float> normed;         // [M, n_embd]             x after a norm
  std::span<float> q;              // [M, n_head, head_dim]
  std::span<float> k;              // [M, n_head_kv, head_dim]
  std::span<float> v;              // [M, n_head_kv, head_dim]
  std::span<float> att;            // [M, n_head, head_dim]   attention output
  std::span<float> gate;           // [M, n_ff]               gate, then activation(gate) * up
  std::span<float> up;             // [M, n_ff]
  std::span<float*> heads;         // [M] backend scratch of norm_head
  std::span<std::byte> quantized;  // [Ops::quantized_bytes] backend scratch: the input of a projection
  // The second query, which scores the pinned rows: turned to min(position, n_ctx - 1) instead, so that the
  // pinned rows stand directly before the oldest moving one (attention sinks, arXiv:2309.17453).
  std::span<float> q_pinned;  // [M, n_head, head_dim]
  // (cos, sin) of every pair. In the epochs' tables both are 0 for pairs that turn too fast to be centred.
  std::span<float> rope;         // [M, rope_dims]           at the row's position
  std::span<float> rope_pinned;  // [M, rope_dims]           at min(position, n_ctx - 1)
  std::span<float> rope_epochs;  // [M, kEpochs, rope_dims]  in the middle of each epoch
  std::span<float> offsets;      // [M, n_head, kEpochs]     q . c_e, which scores of centred keys get back
};

struct Step {
  std::span<const Row> rows;  // [M]
  Activations& a;
};

class Ops {
 public:
  virtual ~Ops() = default;

  virtual const char* name() const = 0;  // "reference", or the instruction set
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

  // 1  x = rows of the embedding
  virtual void embed(const Config&, const Weights&, const Step&) = 0;

  // 2  normed = RMSNorm(x);  q, k, v = projections of it, plus bias
  virtual void norm_qkv(const Config&, const LayerWeights&, const Step&) = 0;

  // 3  turn q (both ways) and k to their positions; write k and v into the cache
  virtual void rope_append(const Config&, const LayerWeights&, std::int32_t layer, const Step&) = 0;

  // 4  att = softmax(q k^T / sqrt(head_dim)) v over every position that the row's query sees
  virtual void attend(const Config&, const LayerWeights&, std::int32_t layer, const Step&) = 0;

  // 5  x += projection of att, plus bias
  virtual void out_residual(const Config&, const LayerWeights&, const Step&) = 0;

  // 6  normed = RMSNorm(x);  gate = silu(gate projection) * up projection
  virtual void norm_gate_up(const Config&, const LayerWeights&, const Step&) = 0;

  // 7  x += projection of gate, plus bias
  virtual void down_residual(const Config&, const LayerWeights&, const Step&) = 0;

  // 8  logits = head(RMSNorm(x)) of the rows that have some
  virtual void norm_head(const Config&, const Weights&, const Step&) = 0;
};

// Whether keys of this layer and cache are centred (kv/cache.h).
inline bool centred(const LayerWeights& w, const kv::Cache& cache) {
  return !w.k_bias.empty() && cache.layout().k_format == KvFormat::Int8;
}

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

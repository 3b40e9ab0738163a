// The eight operations that a decoder consists of. decoder/decoder.cpp calls them in a straight line; every
// backend implements exactly these: ops/reference.cpp to be read, cpu/ to be fast.
//
// Every operation takes the M rows of a step: M = 1 is decode, M > 1 a prefill chunk. The residual stream and
// all activations are float32, row-major, tokens outermost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/cache.h"
#include "model/weights.h"
#include "ringlm/config.h"

namespace ringlm {

// One token on its way through the layers. Rows of a step that share a cache are in ascending position.
struct Row {
  std::int32_t token;
  std::int64_t position;
  const kv::Cache* kv;
};

// The buffers of a step, allocated once for the largest M that the session will ever use.
struct Activations {
  std::span<float> x;       // [M, n_embd]             the residual stream
  std::span<float> normed;  // [M, n_embd]             x after a norm
  std::span<float> q;       // [M, n_head, head_dim]
  std::span<float> k;       // [M, n_head_kv, head_dim]
  std::span<float> v;       // [M, n_head_kv, head_dim]
  std::span<float> att;     // [M, n_head, head_dim]   attention output
  std::span<float> gate;    // [M, n_ff]               gate, then activation(gate) * up
  std::span<float> up;      // [M, n_ff]
  std::span<float> rope;    // [M, rope_dims]          (cos, sin) of every pair at the row's position
  std::span<float> tiles;   // backend scratch of attend: [Ops::tile_floats]
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

  // Floats that attend() needs in Activations::tiles for sessions of up to `capacity` positions.
  virtual std::size_t tile_floats(const Config& config, std::int64_t capacity) const = 0;

  // 1  x = rows of the embedding
  virtual void embed(const Config&, const Weights&, const Step&) = 0;

  // 2  normed = RMSNorm(x);  q, k, v = projections of it, plus bias
  virtual void norm_qkv(const Config&, const LayerWeights&, const Step&) = 0;

  // 3  turn q and k to their positions; write k and v into the cache
  virtual void rope_append(const Config&, std::int32_t layer, const Step&) = 0;

  // 4  att = softmax(q k^T / sqrt(head_dim)) v over every position up to the row's own
  virtual void attend(const Config&, std::int32_t layer, const Step&) = 0;

  // 5  x += projection of att, plus bias
  virtual void out_residual(const Config&, const LayerWeights&, const Step&) = 0;

  // 6  normed = RMSNorm(x);  gate = silu(gate projection) * up projection
  virtual void norm_gate_up(const Config&, const LayerWeights&, const Step&) = 0;

  // 7  x += projection of gate, plus bias
  virtual void down_residual(const Config&, const LayerWeights&, const Step&) = 0;

  // 8  logits [n, n_vocab] = head(RMSNorm(x)) of the step's last n rows
  virtual void norm_head(const Config&, const Weights&, const Step&, std::span<float> logits) = 0;
};

}  // namespace ringlm

#include "decoder/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "model/rope.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// The angles of a row: its own, those of its second query, and those of the epochs that it can meet.
void turn(const Network& net, const Step& s, std::size_t m, bool keys_are_centred) {
  const std::size_t n = size(net.config.rope_dims);
  const kv::Layout& l = s.rows[m].kv->layout();
  const std::int64_t p = s.rows[m].position;
  for (std::size_t rope = 0; rope < net.config.ropes.size(); ++rope) {
    const RopeAngles& angles = net.ropes.at(static_cast<std::int32_t>(rope), s.rows[m].regime);
    const Angles& to = s.a.angles[rope];
    const std::span<float> own = to.own.subspan(m * n, n), pinned = to.pinned.subspan(m * n, n);
    rope_table(angles, p, own);
    if (p < l.n_ctx || l.pinned == 0) {
      std::ranges::copy(own, pinned.begin());
    } else {
      rope_table(angles, l.n_ctx - 1, pinned);
    }
    if (!keys_are_centred) continue;
    const std::int64_t length = l.epoch(), epoch = p / length;
    for (const auto& [e, index] :
         {std::pair{kOwn, epoch}, {kPrevious, epoch - 1}, {kOfPinned, std::int64_t{0}}}) {
      epoch_table(angles, index, length, to.epochs.subspan((m * kEpochs + size(e)) * n, n));
    }
  }
}

// The layer that `net.ops` is at, for messages.
struct Place {
  std::int32_t layer = -1;
  const char* operation = "embed";
};

// `after(place, values)` is called behind every operation that produces numbers, where somebody looks: for
// the first non-finite value when one has been found.
template <class After>
void forward(const Network& net, const Step& s, const std::function<void()>& before_layer, bool looks,
             After after) {
  const Config& c = net.config;
  const std::size_t M = s.rows.size();
  const auto head = [M](std::span<float> buffer, std::int64_t width) {
    return buffer.first(M * size(width));
  };

  const bool offsets = std::ranges::any_of(net.weights.layers, &LayerWeights::keys_have_offset);
  for (std::size_t m = 0; m < M; ++m) {
    turn(net, s, m, offsets && s.rows[m].kv->layout().k_format == KvFormat::Int8);
  }

  struct Unfinished {
    Ops& ops;
    const Step& step;
    bool finished = false;
    ~Unfinished() {
      if (!finished) ops.abandon(step);
    }
  } unfinished{net.ops, s};
  std::ranges::fill(s.bad, std::uint8_t{0});
  net.ops.begin(c, s, looks);
  net.ops.embed(c, net.weights, s);
  after(Place{}, head(s.a.x, c.n_embd));
  for (std::int32_t layer = 0; layer < c.n_layer; ++layer) {
    if (before_layer) before_layer();
    const LayerWeights& w = net.weights.layers[size(layer)];

    net.ops.norm_qkv(c, w, s);
    after(Place{layer, "norm_qkv"}, head(s.a.q, c.q_dim()));
    after(Place{layer, "norm_qkv"}, head(s.a.k, c.kv_dim()));
    after(Place{layer, "norm_qkv"}, head(s.a.v, c.kv_dim()));
    net.ops.rope_append(c, w, layer, s);
    after(Place{layer, "rope_append"}, head(s.a.k, c.kv_dim()));
    after(Place{layer, "rope_append"}, head(s.a.q, c.q_dim()));
    net.ops.attend(c, w, layer, s);
    after(Place{layer, "attend"}, head(s.a.att, c.q_dim()));
    net.ops.out_residual(c, w, s);
    after(Place{layer, "out_residual"}, head(s.a.x, c.n_embd));
    if (!w.experts.empty()) {
      net.ops.route(c, w, s);
      after(Place{layer, "route"}, head(s.a.routing.weights, c.n_slots()));
    }
    net.ops.norm_gate_up(c, w, s);
    after(Place{layer, "norm_gate_up"}, head(s.a.gate, w.experts.empty() ? c.n_ff : c.n_ff_slots()));
    net.ops.down_residual(c, w, s);
    after(Place{layer, "down_residual"}, head(s.a.x, c.n_embd));
  }
  net.ops.norm_head(c, net.weights, s);
  net.ops.finish(c, s);
  unfinished.finished = true;
}

}  // namespace

void run_step(const Network& net, const Step& s, const std::function<void()>& before_layer) {
  forward(net, s, before_layer, false, [](Place, std::span<const float>) {});
}

void name_the_layer(const Network& net, const Step& s) {
  std::vector<float> copy;
  forward(net, s, {}, true, [&](Place place, std::span<const float> values) {
    if (Device* device = net.ops.device()) {
      net.ops.synchronize(s);
      copy.resize(values.size());
      device->copy(std::as_writable_bytes(std::span(copy)), std::as_bytes(values));
      values = copy;
    }
    if (!std::ranges::all_of(values, [](float v) { return std::isfinite(v); })) {
      throw NumericError("NaN or infinity first appears in " +
                         (place.layer < 0
                              ? std::string("the embedding")
                              : "layer " + std::to_string(place.layer) + " (" + place.operation + ")") +
                         ": the weights there are damaged");
    }
    if (s.bad[0] != 0) {
      throw NumericError("a key or value in layer " + std::to_string(place.layer) +
                         " exceeds the range of the cache's format (65504 for f16): open the session with "
                         "kv=\"f32\"" +
                         (net.ops.stores(KvFormat::F32) ? "" : ", on the CPU"));
    }
  });
  if (s.bad[0] != 0) {
    throw NumericError(
        "NaN or infinity first appears in the logits (norm_head): the output weights are damaged");
  }
  throw NumericError(
      "NaN or infinity appears in a chunk of tokens, and not in the token by itself: on a GPU chunks of more "
      "than 8 "
      "tokens are multiplied in f16, and a number exceeds its range (65504). Open the session with chunk=8, "
      "or the model on the CPU");
}

}  // namespace ringlm

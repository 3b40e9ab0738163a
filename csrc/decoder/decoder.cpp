#include "decoder/decoder.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "model/rope.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

// Whether all magnitudes are at most `largest`; NaN is not.
bool all_within(std::span<const float> x, float largest) {
  unsigned bad = 0;
  for (const float v : x) bad |= std::fabs(v) <= largest ? 0u : 1u;
  return bad == 0;
}

bool all_finite(std::span<const float> x) { return all_within(x, std::numeric_limits<float>::max()); }

// From 65520 on, rounding to nearest gives infinity.
float largest(KvFormat format) {
  return format == KvFormat::F16 ? std::nextafter(65520.0f, 0.0f) : std::numeric_limits<float>::max();
}

// The layer that `net.ops` is at, for messages.
struct Place {
  std::int32_t layer = -1;
  const char* operation = "embed";
};

// `after(place, values)` is called behind every operation that produces numbers; it is empty in a normal step
// and looks for the first non-finite value when one has been found.
//
// Keys and values are always looked at: an infinite key can give a query the score -infinity, which hides
// it from this step and from its logits, but not from later ones. Returns false when one does not fit.
template <class After>
bool forward(const Network& net, const Step& s, std::span<float> logits,
             const std::function<void()>& before_layer, After after) {
  const Config& c = net.config;
  const std::size_t M = s.rows.size();
  const auto head = [M](std::span<float> buffer, std::int64_t width) {
    return buffer.first(M * static_cast<std::size_t>(width));
  };

  for (std::size_t m = 0; m < M; ++m) {
    const auto n = static_cast<std::size_t>(c.rope_dims);
    rope_table(net.rope_frequencies, s.rows[m].position, s.a.rope.subspan(m * n, n));
  }

  net.ops.embed(c, net.weights, s);
  after(Place{}, head(s.a.x, c.n_embd));
  for (std::int32_t layer = 0; layer < c.n_layer; ++layer) {
    if (before_layer) before_layer();
    const LayerWeights& w = net.weights.layers[static_cast<std::size_t>(layer)];

    net.ops.norm_qkv(c, w, s);
    after(Place{layer, "norm_qkv"}, head(s.a.q, c.q_dim()));
    after(Place{layer, "norm_qkv"}, head(s.a.k, c.kv_dim()));
    after(Place{layer, "norm_qkv"}, head(s.a.v, c.kv_dim()));
    net.ops.rope_append(c, layer, s);
    const kv::Layout& l = s.rows.front().kv->layout();
    if (!all_within(head(s.a.k, c.kv_dim()), largest(l.k_format)) ||
        !all_within(head(s.a.v, c.kv_dim()), largest(l.v_format))) {
      return false;
    }
    net.ops.attend(c, layer, s);
    after(Place{layer, "attend"}, head(s.a.att, c.q_dim()));
    net.ops.out_residual(c, w, s);
    after(Place{layer, "out_residual"}, head(s.a.x, c.n_embd));
    net.ops.norm_gate_up(c, w, s);
    after(Place{layer, "norm_gate_up"}, head(s.a.gate, c.n_ff));
    net.ops.down_residual(c, w, s);
    after(Place{layer, "down_residual"}, head(s.a.x, c.n_embd));
  }
  if (!logits.empty()) net.ops.norm_head(c, net.weights, s, logits);
  return true;
}

// Runs the step once more, looking behind every operation.
[[noreturn]] void name_the_layer(const Network& net, const Step& s) {
  Place last;
  const bool fits = forward(net, s, {}, {}, [&](Place place, std::span<const float> values) {
    last = place;
    if (all_finite(values)) return;
    throw NumericError("NaN or infinity first appears in " +
                       (place.layer < 0
                            ? std::string("the embedding")
                            : "layer " + std::to_string(place.layer) + " (" + place.operation + ")") +
                       ": the weights there are damaged");
  });
  if (!fits) {
    throw NumericError("a key or value in layer " + std::to_string(last.layer) +
                       " exceeds the range of the cache's format (65504 for f16): open the session with "
                       "kv=\"f32\"");
  }
  throw NumericError(
      "NaN or infinity first appears in the logits (norm_head): the output weights are damaged");
}

}  // namespace

void run_step(const Network& net, const Step& s, std::span<float> logits,
              const std::function<void()>& before_layer) {
  const bool fits = forward(net, s, logits, before_layer, [](Place, std::span<const float>) {});
  const std::size_t n = s.rows.size() * static_cast<std::size_t>(net.config.n_embd);
  if (!fits || !all_finite(s.a.x.first(n)) || !all_finite(logits)) name_the_layer(net, s);
}

}  // namespace ringlm

#include "decoder/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "model/rope.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Whether all magnitudes are at most `largest`; NaN is not.
bool all_within(std::span<const float> x, float largest) {
  unsigned bad = 0;
  for (const float v : x) bad |= std::fabs(v) <= largest ? 0u : 1u;
  return bad == 0;
}

bool all_finite(std::span<const float> x) { return all_within(x, std::numeric_limits<float>::max()); }

// The most that a key or value may be. From 65520 on, rounding to f16 gives infinity: the element, or the
// scale.
float largest(KvFormat format) {
  const float half = std::nextafter(65520.0f, 0.0f);
  return format == KvFormat::F16    ? half
         : format == KvFormat::Int8 ? 127.0f * half
                                    : std::numeric_limits<float>::max();
}

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

// `after(place, values)` is called behind every operation that produces numbers; it is empty in a normal step
// and looks for the first non-finite value when one has been found.
//
// Keys and values are always looked at: an infinite key can give a query the score -infinity, which hides
// it from this step and from its logits, but not from later ones. Rows with one that does not fit are marked.
template <class After>
void forward(const Network& net, const Step& s, std::span<std::uint8_t> bad,
             const std::function<void()>& before_layer, After after) {
  const Config& c = net.config;
  const std::size_t M = s.rows.size();
  const auto head = [M](std::span<float> buffer, std::int64_t width) {
    return buffer.first(M * size(width));
  };
  const auto row_of = [](std::span<float> buffer, std::size_t m, std::int64_t width) {
    return buffer.subspan(m * size(width), size(width));
  };

  const bool offsets = std::ranges::any_of(net.weights.layers, &LayerWeights::keys_have_offset);
  for (std::size_t m = 0; m < M; ++m) {
    turn(net, s, m, offsets && s.rows[m].kv->layout().k_format == KvFormat::Int8);
  }

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
    after(Place{layer, "rope_append"}, head(s.a.q, c.q_dim()));
    after(Place{layer, "rope_append"}, head(s.a.k, c.kv_dim()));
    for (std::size_t m = 0; m < M; ++m) {
      const kv::Layout& l = s.rows[m].kv->layout();
      if (!all_within(row_of(s.a.k, m, c.kv_dim()), largest(l.k_format)) ||
          !all_within(row_of(s.a.v, m, c.kv_dim()), largest(l.v_format))) {
        bad[m] = 1;
      }
    }
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
}

}  // namespace

void run_step(const Network& net, const Step& s, std::span<std::uint8_t> bad,
              const std::function<void()>& before_layer) {
  std::fill(bad.begin(), bad.end(), std::uint8_t{0});
  forward(net, s, bad, before_layer, [](Place, std::span<const float>) {});
  for (std::size_t m = 0; m < s.rows.size(); ++m) {
    const std::span<const float> x = s.a.x.subspan(m * size(net.config.n_embd), size(net.config.n_embd));
    const float* logits = s.rows[m].logits;
    if (!all_finite(x) || (logits && !all_finite({logits, size(net.config.n_vocab)}))) bad[m] = 1;
  }
}

void name_the_layer(const Network& net, const Step& s) {
  Place last;
  std::uint8_t bad = 0;
  forward(net, s, {&bad, 1}, {}, [&](Place place, std::span<const float> values) {
    if (bad != 0) {
      throw NumericError("a key or value in layer " + std::to_string(last.layer) +
                         " exceeds the range of the cache's format (65504 for f16): open the session with "
                         "kv=\"f32\"");
    }
    last = place;
    if (all_finite(values)) return;
    throw NumericError("NaN or infinity first appears in " +
                       (place.layer < 0
                            ? std::string("the embedding")
                            : "layer " + std::to_string(place.layer) + " (" + place.operation + ")") +
                       ": the weights there are damaged");
  });
  throw NumericError(
      "NaN or infinity first appears in the logits (norm_head): the output weights are damaged");
}

}  // namespace ringlm

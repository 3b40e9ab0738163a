#include "decoder/decoder.h"

#include <bit>
#include <cstdint>
#include <string>

#include "model/rope.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

bool all_finite(std::span<const float> x) {
  constexpr std::uint32_t exponent = 0x7f800000u;  // all ones in infinities and NaN alone
  std::uint32_t bad = 0;
  for (const float v : x) bad |= (std::bit_cast<std::uint32_t>(v) & exponent) == exponent ? 1u : 0u;
  return bad == 0;
}

// `after(layer, operation, values)` is called behind every operation that produces numbers; it is empty in
// a normal step and looks for the first non-finite value when one has been found at the end.
template <class After>
void forward(const Network& net, const Step& s, std::span<float> logits, const std::atomic<bool>& cancel,
             After after) {
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
  after(-1, "embed", head(s.a.x, c.n_embd));
  for (std::int32_t layer = 0; layer < c.n_layer; ++layer) {
    if (cancel.load(std::memory_order_relaxed)) throw Cancelled("the step was cancelled", 0);
    const LayerWeights& w = net.weights.layers[static_cast<std::size_t>(layer)];

    net.ops.norm_qkv(c, w, s);
    after(layer, "norm_qkv", head(s.a.q, c.q_dim()));
    after(layer, "norm_qkv", head(s.a.k, c.kv_dim()));
    after(layer, "norm_qkv", head(s.a.v, c.kv_dim()));
    net.ops.rope_append(c, layer, s);
    net.ops.attend(c, layer, s);
    after(layer, "attend", head(s.a.att, c.q_dim()));
    net.ops.out_residual(c, w, s);
    after(layer, "out_residual", head(s.a.x, c.n_embd));
    net.ops.norm_gate_up(c, w, s);
    after(layer, "norm_gate_up", head(s.a.gate, c.n_ff));
    net.ops.down_residual(c, w, s);
    after(layer, "down_residual", head(s.a.x, c.n_embd));
  }
  if (!logits.empty()) net.ops.norm_head(c, net.weights, s, logits);
}

// Runs the step once more, looking behind every operation.
[[noreturn]] void name_the_layer(const Network& net, const Step& s) {
  const std::atomic<bool> never{false};
  forward(net, s, {}, never, [](std::int32_t layer, const char* operation, std::span<const float> values) {
    if (all_finite(values)) return;
    const std::string where =
        layer < 0 ? "the embedding" : "layer " + std::to_string(layer) + " (" + operation + ")";
    throw NumericError("NaN or infinity first appears in " + where +
                       ": the weights there are damaged, or the activations exceed the range of the K/V "
                       "format (try kv=\"f32\")");
  });
  throw NumericError(
      "NaN or infinity first appears in the logits (norm_head): the output weights are damaged");
}

}  // namespace

void run_step(const Network& net, const Step& s, std::span<float> logits, const std::atomic<bool>& cancel) {
  forward(net, s, logits, cancel, [](std::int32_t, const char*, std::span<const float>) {});
  const std::size_t n = s.rows.size() * static_cast<std::size_t>(net.config.n_embd);
  if (!all_finite(s.a.x.first(n)) || !all_finite(logits)) name_the_layer(net, s);
}

}  // namespace ringlm

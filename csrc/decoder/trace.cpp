#include "decoder/trace.h"

#include <algorithm>
#include <numeric>

namespace ringlm {
namespace {

// As kOperations has them.
enum Operation : std::size_t {
  kEmbed,
  kNormQkv,
  kRopeAppend,
  kAttend,
  kOutResidual,
  kNormGateUp,
  kDownResidual,
  kNormHead
};

}  // namespace

std::vector<TraceRecord> Trace::take() {
  std::vector<TraceRecord> taken(count);
  for (std::size_t i = 0; i < count; ++i) {
    taken[i] = records[(next + records.size() - count + i) % records.size()];
  }
  count = 0;
  return taken;
}

template <class F>
void TimedOps::timed(std::size_t operation, const Step& s, F f) {
  const auto began = std::chrono::steady_clock::now();
  f();
  inner_.synchronize(s);
  seconds_[operation] += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

void TimedOps::embed(const Config& c, const Weights& w, const Step& s) {
  timed(kEmbed, s, [&] { inner_.embed(c, w, s); });
}
void TimedOps::norm_qkv(const Config& c, const LayerWeights& w, const Step& s) {
  timed(kNormQkv, s, [&] { inner_.norm_qkv(c, w, s); });
}
void TimedOps::rope_append(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) {
  timed(kRopeAppend, s, [&] { inner_.rope_append(c, w, layer, s); });
}
void TimedOps::attend(const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s) {
  timed(kAttend, s, [&] { inner_.attend(c, w, layer, s); });
}
void TimedOps::out_residual(const Config& c, const LayerWeights& w, const Step& s) {
  timed(kOutResidual, s, [&] { inner_.out_residual(c, w, s); });
}
void TimedOps::route(const Config& c, const LayerWeights& w, const Step& s) {
  timed(kNormGateUp, s, [&] { inner_.route(c, w, s); });
}
void TimedOps::norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) {
  timed(kNormGateUp, s, [&] { inner_.norm_gate_up(c, w, s); });
}
void TimedOps::down_residual(const Config& c, const LayerWeights& w, const Step& s) {
  timed(kDownResidual, s, [&] { inner_.down_residual(c, w, s); });
}
void TimedOps::norm_head(const Config& c, const Weights& w, const Step& s) {
  timed(kNormHead, s, [&] { inner_.norm_head(c, w, s); });
}

Measurement::Measurement(const Trace* trace)
    : trace_(trace && trace->on() ? trace : nullptr), began_(std::chrono::steady_clock::now()) {
  if (trace_ && trace_->allocations) record_.allocations = trace_->allocations();
}

void Measurement::stop() {
  if (!trace_) return;
  record_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  record_.allocations = trace_->allocations ? trace_->allocations() - record_.allocations : -1;
}

void Measurement::add_to(Trace& trace, StepKind kind, const Config& c, const Weights& w,
                         std::span<const Row> rows) const {
  if (!trace.on()) return;
  TraceRecord record = record_;
  record.kind = kind;
  record.position = rows.front().position;
  record.n_tokens = static_cast<std::int32_t>(rows.size());
  record.operation_bytes = operation_weight_bytes(c, w, rows);
  record.weight_bytes =
      std::accumulate(record.operation_bytes.begin(), record.operation_bytes.end(), std::size_t{0});
  record.kv_bytes = kv_bytes(rows);
  record.operation_bytes[kAttend] += record.kv_bytes;
  trace.add(record);
}

std::array<std::size_t, kOperations.size()> operation_weight_bytes(const Config& c, const Weights& w,
                                                                   std::span<const Row> rows) {
  const auto of = [](const Matrix& m) { return m.data.size(); };
  const auto floats = [](const Vector& v) { return v.size() * sizeof(float); };
  std::array<std::size_t, kOperations.size()> bytes{};
  bytes[kEmbed] = rows.size() * w.token_embd.row_bytes;
  for (const LayerWeights& l : w.layers) {
    bytes[kNormQkv] += of(l.q) + of(l.k) + of(l.v) + floats(l.attn_norm) + floats(l.q_bias) +
                       floats(l.k_bias) + floats(l.v_bias);
    bytes[kRopeAppend] += floats(l.q_norm) + floats(l.k_norm);
    bytes[kOutResidual] += of(l.out) + floats(l.out_bias) + floats(l.attn_post_norm);
    bytes[kNormGateUp] += of(l.router) + floats(l.ffn_norm) + floats(l.shared_gate);
    bytes[kDownResidual] += floats(l.ffn_post_norm);
    // A step of many tokens may go to fewer experts than it could.
    const std::size_t n_expert = static_cast<std::size_t>(c.n_expert);
    const std::size_t used = std::min(n_expert, rows.size() * static_cast<std::size_t>(c.n_expert_used));
    std::size_t i = 0;
    l.for_each_network([&](const FeedForward& n) {
      const bool routed = !l.experts.empty() && i < n_expert;
      if (!routed || i < used) {  // those of one size: any will do
        bytes[kNormGateUp] += of(n.gate) + of(n.up) + floats(n.gate_bias) + floats(n.up_bias);
        bytes[kDownResidual] += of(n.down) + floats(n.down_bias);
      }
      ++i;
    });
  }
  const bool head = std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.logits != nullptr; });
  if (head) bytes[kNormHead] = floats(w.output_norm) + of(w.head);
  return bytes;
}

std::size_t kv_bytes(std::span<const Row> rows) {
  std::size_t sum = 0;
  for (const Row& row : rows) {
    const kv::Layout& l = row.kv->layout();
    const std::size_t both =
        (l.row_bytes(l.k_format) + l.row_bytes(l.v_format)) * static_cast<std::size_t>(l.n_head_kv);
    for (std::int32_t layer = 0; layer < l.n_layer; ++layer) {
      sum += both * static_cast<std::size_t>(row.kv->ring(layer).seen(row.position));
    }
  }
  return sum;
}

}  // namespace ringlm

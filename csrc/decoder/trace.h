// A backend that measures another one, and the bytes that a step has to read.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/trace.h"

namespace ringlm {

// The last records, in room taken once.
struct Trace {
  std::vector<TraceRecord> records;  // [capacity]; empty: no trace
  std::size_t next = 0;              // where the next one goes
  std::size_t count = 0;
  std::function<std::int64_t()> allocations;

  bool on() const { return !records.empty(); }
  void add(const TraceRecord& record) {
    records[next] = record;
    next = (next + 1) % records.size();
    if (count < records.size()) ++count;
  }
  std::vector<TraceRecord> take();
};

// Runs the operations of `inner` and adds up their seconds, in the order of kOperations.
class TimedOps final : public Ops {
 public:
  TimedOps(Ops& inner, std::array<double, kOperations.size()>& seconds) : inner_(inner), seconds_(seconds) {}

  const char* name() const override { return inner_.name(); }
  int n_threads() const override { return inner_.n_threads(); }
  std::size_t tile_floats(const Config& c, std::int64_t tiles) const override {
    return inner_.tile_floats(c, tiles);
  }
  std::size_t quantized_bytes(const Config& c, std::int64_t M) const override {
    return inner_.quantized_bytes(c, M);
  }
  std::size_t packed_bytes() const override { return inner_.packed_bytes(); }
  bool packed() const override { return inner_.packed(); }
  std::size_t scratch_bytes() const override { return inner_.scratch_bytes(); }
  Device* device() override { return inner_.device(); }
  bool stores(KvFormat format) const override { return inner_.stores(format); }
  void begin(const Config& c, const Step& s, bool) override { inner_.begin(c, s, true); }
  void finish(const Config& c, const Step& s) override { inner_.finish(c, s); }
  void abandon(const Step& s) noexcept override { inner_.abandon(s); }
  void synchronize(const Step& s) override { inner_.synchronize(s); }
  void embed(const Config&, const Weights&, const Step&) override;
  void norm_qkv(const Config&, const LayerWeights&, const Step&) override;
  void rope_append(const Config&, const LayerWeights&, std::int32_t layer, const Step&) override;
  void attend(const Config&, const LayerWeights&, std::int32_t layer, const Step&) override;
  void out_residual(const Config&, const LayerWeights&, const Step&) override;
  void route(const Config&, const LayerWeights&, const Step&) override;
  void norm_gate_up(const Config&, const LayerWeights&, const Step&) override;
  void down_residual(const Config&, const LayerWeights&, const Step&) override;
  void norm_head(const Config&, const Weights&, const Step&) override;

 private:
  template <class F>
  void timed(std::size_t operation, const Step& s, F f);

  Ops& inner_;
  std::array<double, kOperations.size()>& seconds_;
};

// From before a step to behind it, where one of its sessions is traced.
class Measurement {
 public:
  // trace: null or off measures nothing
  explicit Measurement(const Trace* trace);

  // Where the step's operations add their seconds, or null.
  std::array<double, kOperations.size()>* seconds() { return trace_ ? &record_.operation_seconds : nullptr; }

  void stop();
  // One session's record of the step. rows: its own; weights are read once for all.
  void add_to(Trace& trace, StepKind kind, const Config& c, const Weights& w,
              std::span<const Row> rows) const;

 private:
  const Trace* trace_;
  TraceRecord record_{};
  std::chrono::steady_clock::time_point began_;
};

// Bytes of the weights that each operation of a step over these rows has to read, every matrix once (of
// experts as many as the rows can go to), and of the K/V rows that their queries see.
std::array<std::size_t, kOperations.size()> operation_weight_bytes(const Config& c, const Weights& w,
                                                                   std::span<const Row> rows);
std::size_t kv_bytes(std::span<const Row> rows);

}  // namespace ringlm

// What a session has on the GPU: the memory that it carves (decoder/session_memory.cpp), scratch of the
// kernels in there, what is uploaded for every step, a stream, and the graphs of its decode steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "cuda/launch.h"
#include "cuda/runtime.h"
#include "ops/ops.h"

namespace ringlm::cuda {

// Carves arrays in declaration order, aligned to 256 bytes from where they begin; only measures where base is
// null.
class Places {
 public:
  explicit Places(std::uint8_t* base) : base_(base) {}
  template <class T>
  T* take(std::size_t n) {
    const std::size_t at = used_;
    used_ += (n * sizeof(T) + 255) / 256 * 256;
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  std::size_t used() const { return used_; }

 private:
  std::uint8_t* base_;
  std::size_t used_ = 0;
};

// What the host writes for a step of M rows and the device gets as one copy.
struct Upload {
  DeviceRow* rows;       // [M]
  std::int32_t* wanted;  // [M] the rows that want logits come first
  std::uint32_t* bad;    // [M] zeros
  struct {
    float *own, *pinned, *epochs;  // ops/ops.h
  } angles[kMostRopes];
  std::size_t bytes;

  Upload(const Config& c, std::int64_t M, std::uint8_t* base);
};

// At most how many blocks of the decode attention work on one row and KV head: the same for all M, so that a
// row of a batch is summed as it is alone.
int attend_splits(const Config& c, int n_sm);

// In Activations::quantized.
struct Scratch {
  std::uint8_t* upload;
  Quantized embd, att, ff;  // inputs of gemv, of kMostRows rows; embd, in models with experts, of all
  Quantized slots, shared;  // experts: [M n_expert_used, n_ff_expert] and [M, n_ff_shared]
  float* shared_score;      // [M]
  half* halves;             // inputs of gemm, of all rows and any width
  float* half_steps;        // [M]
  float* partial;           // of attend
  unsigned* arrived;  // [kMostRows, n_head_kv] of attend, then [kMostRows] of top_k; zero between launches
  float* logits;  // [few, n_vocab], at least 2 rows: a single one that keeps them has one of the first two
  TopLogits* largest;  // [kMostRows]
  std::byte* top_k;
  std::size_t bytes;

  Scratch(const Config& c, std::int64_t M, int n_sm, std::uint8_t* base);
};

class Region final : public DeviceRegion {
 public:
  Region(const Config& c, std::size_t bytes, std::size_t host_bytes, std::int64_t M,
         std::function<void(Region*)> gone);
  ~Region() override;

  std::span<std::byte> bytes() const override { return std::as_writable_bytes(memory_.span()); }
  std::span<std::byte> host() const override { return std::as_writable_bytes(host_.span()); }
  std::span<const float> logits(int row) const override {
    return {scratch->logits + static_cast<std::size_t>(row) * n_vocab_, n_vocab_};
  }

  // Bytes of pinned memory that a region takes besides.
  static std::size_t staging_bytes(const Config& c, std::int64_t M);

  // The rings of the session's cache in device memory [n_layer], written when a step first meets them.
  const KvLayer* layers(const kv::Cache& cache);

  // Finds the scratch, in the first step.
  void place(const Config& c, int n_sm, const Step& s);

  // Ops::begin and the other two. A decode step is captured when there is none like it yet, and replayed
  // from then on: its operations then launch nothing.
  using LayersOf = std::function<const KvLayer*(const kv::Cache&)>;
  void begin(const Config& c, const Step& s, bool looks, bool graph, const LayersOf& layers_of);
  void finish(const Config& c, const Step& s);
  void synchronize(const Config& c, const Step& s);
  void abandon() noexcept;

  // Row `from` of Scratch::logits, on its way to the host; or those of all rows of a step that all want them,
  // unless they stay here.
  void fetch_logits(const Config& c, std::int64_t from, float* to);
  void fetch_logits(const Config& c, const Step& s);

  const StreamHandle stream;
  std::optional<Scratch> scratch;

  // Of the step that runs: how its operations come to the device, and whether somebody looks between them.
  enum class Way {
    Direct,   // launched one by one
    Capture,  // put into a graph, which finish() launches
    Replay,   // they are in the graph already
  };
  Way way = Way::Direct;
  bool looks = false;

 private:
  void upload(const Config& c, const Step& s, const LayersOf& layers_of);
  void fetch_results(const Config& c, const Step& s);
  void take_results(const Step& s) const;

  const std::int64_t M_;  // most rows of a step
  const std::size_t n_vocab_;
  std::function<void(Region*)> gone_;
  DeviceMemory memory_, layers_;
  PinnedMemory host_, staging_, bad_, largest_;  // the last two: what a step gives
  std::uint64_t key_ = 0;
  std::map<std::uint64_t, Graph> graphs_;  // by what a step depends on besides its upload
  bool has_layers_ = false;
};

}  // namespace ringlm::cuda

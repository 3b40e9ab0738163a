// What a step did, for a look inside.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ringlm {

constexpr std::array<const char*, 8> kOperations = {"embed",         "norm_qkv",     "rope_append",
                                                    "attend",        "out_residual", "norm_gate_up",
                                                    "down_residual", "norm_head"};

enum class StepKind {
  Prefill,
  Decode,
  Rebuild,  // tokens that were fed before, computed again for other RoPE angles
};

struct TraceRecord {
  StepKind kind;
  std::int64_t position;     // of its first token
  std::int32_t n_tokens;     // 1 for a decode
  std::size_t weight_bytes;  // that the step has to read: every matrix once (of experts those that can be
                             // used), and the embedding's rows
  std::size_t kv_bytes;      // of the rows that the queries saw, each query's counted
  double seconds;            // of the whole step
  std::array<double, kOperations.size()> operation_seconds;  // over all layers
  // What each has to read, over all layers: its weights, and for attend kv_bytes.
  std::array<std::size_t, kOperations.size()> operation_bytes;
  std::int64_t
      allocations;  // heap allocations during the step, as start_trace() was told to count them, or -1
};

}  // namespace ringlm

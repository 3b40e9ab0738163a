// Attention of a step: its cut into work for the threads. The arithmetic is in attention_body.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "ops/ops.h"

namespace ringlm::cpu {

// What a query sees is cut into spans by its position alone. A span's result does not depend on who computes
// it, nor with which other queries, and results are merged in the order of the spans: every way through
// this class gives the same bits.
class Attention {
 public:
  // rotation, tables: of INT8 values; must outlive this.
  Attention(const Config& c, const Kernels& k, const kv::Rotation& rotation, std::span<const float> tables,
            int n_threads);

  // Ops::attend
  void run(Team& team, const Config& c, const LayerWeights& w, std::int32_t layer, const Step& s);

  // Ops::tile_floats
  static std::size_t tile_floats(const Config& c, std::int64_t tiles);

  std::size_t bytes() const { return memory_.size() * sizeof(float); }

 private:
  struct Task;    // some queries and one KV head
  struct Memory;  // of one thread

  Memory memory(int thread, std::int32_t n);
  void attend_span(const Task& t, std::int64_t index, const Memory& memory, const std::uint8_t* next_keys,
                   Partial* parts, float* sums) const;
  void split(Team& team, const Task& row);
  void whole(Team& team, const Task& step, std::int32_t n_tokens);
  void whole_block(const Task& t, const Memory& memory) const;
  void finish(const Task& t, std::int64_t query, const Partial& part, const float* sum) const;

  const Kernels& k_;
  const kv::Rotation& rotation_;
  std::span<const float> tables_;
  std::int32_t most_;          // queries of a block
  std::size_t thread_floats_;  // a multiple of a cache line
  std::vector<float> memory_;  // [threads, thread_floats_]
};

}  // namespace ringlm::cpu

// One step through the model: a straight line over the eight operations.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "model/rope.h"
#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/config.h"

namespace ringlm {

struct Network {
  const Config& config;
  const Weights& weights;
  const Ropes& ropes;
  Ops& ops;
};

// Writes the rows' keys and values into their caches and, for rows that ask for them, logits. `before_layer`
// is called before every layer; what it throws ends the step. bad [M] becomes 1 for rows with a number that
// is no longer finite or does not fit the K/V format, and 0 for the others, which are not touched by it.
// Nothing but the slots of these positions, the activations and the rows' logits changes.
void run_step(const Network& net, const Step& step, std::span<std::uint8_t> bad,
              const std::function<void()>& before_layer);

// Runs the step of a single bad row again. Throws NumericError, which names layer and operation.
[[noreturn]] void name_the_layer(const Network& net, const Step& step);

}  // namespace ringlm

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

// Writes the rows' keys and values into their caches and, for rows that ask for them, logits; fills in
// step.bad. `before_layer` is called before every layer; what it throws ends the step. A bad row does not
// touch the others. Nothing but the slots of these positions, the activations and the rows' logits changes.
void run_step(const Network& net, const Step& step, const std::function<void()>& before_layer);

// Runs the step of a single bad row again. Throws NumericError, which names layer and operation.
[[noreturn]] void name_the_layer(const Network& net, const Step& step);

}  // namespace ringlm

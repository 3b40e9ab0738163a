// One step through the model: a straight line over the eight operations.
#pragma once

#include <functional>
#include <span>

#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/config.h"

namespace ringlm {

struct Network {
  const Config& config;
  const Weights& weights;
  std::span<const double> rope_frequencies;
  Ops& ops;
};

// Writes the rows' keys and values into their caches and, for the last n rows, logits [n, n_vocab] (n may be
// 0). `before_layer` is called before every layer; what it throws ends the step. Throws NumericError, naming
// the layer and operation, when a number is no longer finite or does not fit the K/V format. Nothing outside
// the caches' rows at these positions, the activations and `logits` has changed then.
void run_step(const Network& net, const Step& step, std::span<float> logits,
              const std::function<void()>& before_layer);

}  // namespace ringlm

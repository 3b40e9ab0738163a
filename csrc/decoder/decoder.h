// One step through the model: a straight line over the eight operations.
#pragma once

#include <atomic>
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
// 0). Throws Cancelled when `cancel` becomes true between two layers, and NumericError, naming the layer and
// operation, when a number is no longer finite. Nothing outside the caches' rows at these positions and
// `logits` has changed then.
void run_step(const Network& net, const Step& step, std::span<float> logits, const std::atomic<bool>& cancel);

}  // namespace ringlm

// The eight operations on the current GPU.
#pragma once

#include <memory>

#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/config.h"

namespace ringlm::cuda {

struct CudaOptions {
  bool graph = true;  // decode steps are captured once and run as one graph
};

// Loads the weights. Throws DeviceError, OutOfMemory before anything is loaded, UnsupportedModelError. The
// first two arguments must outlive what it returns.
std::unique_ptr<Ops> make_cuda_ops(const Config& config, const Weights& weights,
                                   const CudaOptions& options = {});

}  // namespace ringlm::cuda

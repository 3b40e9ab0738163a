// The eight operations on the current GPU.
#pragma once

#include <memory>

#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/config.h"

namespace ringlm::cuda {

// Throws as Library::open does (library.h). Both arguments must outlive what it returns.
std::unique_ptr<Ops> make_cuda_ops(const Config& config, const Weights& weights);

}  // namespace ringlm::cuda

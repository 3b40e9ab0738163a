#pragma once

#include <memory>

#include "ops/ops.h"

namespace ringlm {

// The operations with SIMD over a team of `n_threads` threads (0: as many as this process may use). Results
// are bit-equal for every number of threads and every cut of a text into steps.
std::unique_ptr<Ops> make_cpu_ops(const Config& config, int n_threads);

}  // namespace ringlm

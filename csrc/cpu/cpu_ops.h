#pragma once

#include <memory>

#include "model/weights.h"
#include "ops/ops.h"

namespace ringlm {

struct CpuOptions {
  int n_threads = 0;  // 0: as many as this process may use
  bool pack = true;   // weights into memory, in the order of the kernels; else they stay in the mapped file
};

// The operations with SIMD over a team of threads. Results are bit-equal for every number of threads and
// every cut of a text into steps. Throws OutOfMemory where packed weights do not fit.
std::unique_ptr<Ops> make_cpu_ops(const Config& config, const Weights& weights, const CpuOptions& options);

}  // namespace ringlm

// The activation of a gate, as ops/reference.cpp has it: x sigmoid(x), and x sigmoid(2 u) with
// u = sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh u) / 2.
#pragma once

#include "cuda/port.h"
#include "ringlm/config.h"

namespace ringlm::cuda {

__device__ __forceinline__ float activate(Activation kind, float x) {
  const float u = kind == Activation::Silu ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + expf(-u));
}

}  // namespace ringlm::cuda

// The tensor types whose matrix products have packed kernels on the CPU.
#pragma once

#include <span>

#include "gguf/types.h"

namespace ringlm::cpu {

// By ascending number. A type that is readable but not among them runs through float32 rows.
std::span<const gguf::DType> fast_types();

}  // namespace ringlm::cpu

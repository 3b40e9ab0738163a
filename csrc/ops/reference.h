#pragma once

#include <memory>

#include "ops/ops.h"

namespace ringlm {

// The mathematics, written to be read: one thread, plain loops, sums in double. It stays the oracle that
// every other backend is tested against.
std::unique_ptr<Ops> make_reference_ops();

}  // namespace ringlm

// What a file says about RoPE.
#pragma once

#include <cstdint>

#include "model/architecture.h"
#include "model/keys.h"
#include "ringlm/config.h"

namespace ringlm {

// The angles of the layers that have none of their own for a window. `c` has n_ctx_train and rope_dims. A
// type of scaling that is not known must not be ignored: the model would run and answer nonsense beyond its
// first few thousand tokens.
Rope read_rope(const Keys& keys, const Architecture& a, const Config& c);

// Config::n_ctx_limit with this rope.
std::int64_t context_limit(const Config& c, const Rope& rope);

}  // namespace ringlm

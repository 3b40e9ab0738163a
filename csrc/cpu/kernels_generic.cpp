#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kGeneric = make_kernels(
#if defined(__aarch64__)
    "neon"
#else
    "generic"
#endif
);
}  // namespace ringlm::cpu

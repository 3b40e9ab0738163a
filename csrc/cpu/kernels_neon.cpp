#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kNeon = make_kernels("neon");
}

#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kDotprod = make_kernels("dotprod");
}

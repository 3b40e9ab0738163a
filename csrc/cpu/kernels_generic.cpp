#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kGeneric = make_kernels("generic");
}

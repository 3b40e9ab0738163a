#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kI8mm = make_kernels("i8mm");
}

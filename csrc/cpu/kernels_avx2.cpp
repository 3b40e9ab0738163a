#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kAvx2 = make_kernels("avx2");
}

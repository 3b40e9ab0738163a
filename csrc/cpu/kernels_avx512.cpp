#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kAvx512 = make_kernels("avx512");
}

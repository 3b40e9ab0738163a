#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kAvxVnni = make_kernels("avxvnni");
}

#include "cpu/kernels_body.h"

namespace ringlm::cpu {
const Kernels kAmx = make_kernels("amx");
}

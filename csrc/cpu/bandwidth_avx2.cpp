#include "cpu/bandwidth_body.h"

namespace ringlm::cpu {
constinit const ReadPatterns kReadAvx2 = kRead<32>;
}

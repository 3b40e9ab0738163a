#include "cpu/bandwidth_body.h"

namespace ringlm::cpu {
constinit const ReadPatterns kReadAvx512 = kRead<64>;
}

// The source line of a call in a kernel.
#pragma once

#include <source_location>

namespace simt {

using Site = std::source_location;

}  // namespace simt

#include "bindings/bindings.h"

namespace ringlm::bindings {
void bind_sampler(pybind11::module_&) {}
}  // namespace ringlm::bindings

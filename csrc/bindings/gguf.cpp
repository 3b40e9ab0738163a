#include "bindings/bindings.h"

namespace ringlm::bindings {
void bind_gguf(pybind11::module_&) {}
}  // namespace ringlm::bindings

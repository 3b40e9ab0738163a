#pragma once

#include <pybind11/pybind11.h>

namespace ringlm::bindings {

void bind_errors(pybind11::module_& m);
void bind_gguf(pybind11::module_& m);
void bind_sampler(pybind11::module_& m);

}  // namespace ringlm::bindings

#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "ringlm/model.h"

namespace ringlm::bindings {

// What Python holds: close() lets go of the model, open sessions keep it.
struct ModelHandle {
  std::shared_ptr<const Model> model;

  std::shared_ptr<const Model> get() const;  // throws StateError when closed
};

void bind_errors(pybind11::module_& m);
void bind_gguf(pybind11::module_& m);
void bind_model(pybind11::module_& m);
void bind_sampler(pybind11::module_& m);
void bind_session(pybind11::module_& m);

}  // namespace ringlm::bindings

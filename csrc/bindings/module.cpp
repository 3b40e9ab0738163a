// The extension module ringlm._core: one file per class, no logic.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"

PYBIND11_MODULE(_core, m) {
  m.doc() = "ringlm's C++ core. Use the classes in `ringlm`; this module is not a public interface.";
  ringlm::bindings::bind_errors(m);
  ringlm::bindings::bind_bandwidth(m);
  ringlm::bindings::bind_gguf(m);
  ringlm::bindings::bind_model(m);
  ringlm::bindings::bind_sampler(m);
  ringlm::bindings::bind_session(m);
}

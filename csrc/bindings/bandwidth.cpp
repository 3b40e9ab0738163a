// ringlm._core.MemoryReader.
#include "cpu/bandwidth.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace ringlm::bindings {

void bind_bandwidth(py::module_& m) {
  using cpu::MemoryReader;
  using Release = py::call_guard<NoGil>;
  py::class_<MemoryReader>(m, "MemoryReader")
      .def(py::init<std::size_t, int>(), py::arg("nbytes"), py::arg("n_threads"), Release())
      .def("read", &MemoryReader::read, py::arg("passes"), py::arg("parts") = 1, Release())
      .def_property_readonly("nbytes", &MemoryReader::bytes)
      .def_property_readonly("n_threads", &MemoryReader::n_threads);
}

}  // namespace ringlm::bindings

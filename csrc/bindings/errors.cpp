// C++ errors become the Python classes of ringlm.errors, looked up when one is thrown: the classes are
// documented and importable there without the extension.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "ringlm/error.h"

namespace py = pybind11;

namespace ringlm::bindings {
namespace {

void set_error(const char* name, const char* what) {
  PyErr_SetString(py::module_::import("ringlm.errors").attr(name).ptr(), what);
}

}  // namespace

void set_python_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& e) {
    e.restore();
  } catch (const Cancelled& e) {
    py::object type = py::module_::import("ringlm.errors").attr("Cancelled");
    PyErr_SetObject(type.ptr(), type(e.what(), e.consumed).ptr());
  } catch (const FileFormatError& e) {
    set_error("FileFormatError", e.what());
  } catch (const UnsupportedModelError& e) {
    set_error("UnsupportedModelError", e.what());
  } catch (const ContextOverflow& e) {
    set_error("ContextOverflow", e.what());
  } catch (const OutOfMemory& e) {
    set_error("OutOfMemory", e.what());
  } catch (const DeviceError& e) {
    set_error("DeviceError", e.what());
  } catch (const NumericError& e) {
    set_error("NumericError", e.what());
  } catch (const InvalidArgument& e) {
    set_error("InvalidArgument", e.what());
  } catch (const StateError& e) {
    set_error("StateError", e.what());
  } catch (const Error& e) {
    set_error("Error", e.what());
  }
}

void bind_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr p) {
    if (p) set_python_error(p);
  });
}

}  // namespace ringlm::bindings

// ringlm._core.GGUF: metadata and raw tensor bytes of a GGUF file.
#include "gguf/file.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/pack.h"
#include "gguf/text.h"
#include "ringlm/error.h"

namespace py = pybind11;

namespace ringlm::bindings {
namespace {

using gguf::File;
using gguf::StringReader;
using gguf::Tensor;
using gguf::Value;
using gguf::ValueType;

// One tensor as Python sees it; everything is copied, so it outlives the file.
struct TensorInfo {
  py::str name;
  py::tuple shape;
  std::string type;
  std::size_t nbytes;
  std::uint64_t n_elements;
  std::uint64_t offset;
  std::uint32_t shard;
};

// Bytes that are not UTF-8 survive as surrogates: `.encode("utf-8", "surrogateescape")` gives them back.
py::str to_str(std::string_view text) {
  PyObject* str = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape");
  if (str == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(str);
}

// The UTF-8 bytes of a name given by Python, the inverse of to_str.
std::string to_bytes(const py::str& text) {
  PyObject* raw = PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogateescape");
  if (raw == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(raw);
}

py::list to_str_list(const Value& value) {
  py::list list(static_cast<std::size_t>(value.count));
  StringReader reader(value);
  for (std::size_t i = 0; i < list.size(); ++i) {
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), to_str(reader.next()).release().ptr());
  }
  return list;
}

py::array to_array(const Value& value) {
  py::array array;
  with_number_type(value.element, [&]<typename T>(const T*) {
    array = py::array_t<T>(static_cast<py::ssize_t>(value.count));
    if (value.count > 0) std::memcpy(array.mutable_data(), value.bytes.data(), value.bytes.size());
  });
  return array;
}

py::object to_python(const Value& value) {
  if (value.type == ValueType::String) return to_str(StringReader(value).next());
  if (value.type == ValueType::Array) {
    return value.element == ValueType::String ? py::object(to_str_list(value)) : py::object(to_array(value));
  }
  py::object number;
  with_number_type(value.type,
                   [&]<typename T>(const T*) { number = py::cast(gguf::load<T>(value.bytes.data())); });
  return number;
}

py::list keys(const File& file) {
  py::list list;
  for (const gguf::Entry& entry : file.metadata()) list.append(to_str(entry.key));
  return list;
}

py::object get(const File& file, const py::str& key, const py::object& otherwise) {
  const Value* value = file.find(to_bytes(key));
  return value == nullptr ? otherwise : to_python(*value);
}

std::string value_type(const File& file, const py::str& key) {
  const std::string bytes = to_bytes(key);
  const Value* value = file.find(bytes);
  if (value == nullptr) {
    throw InvalidArgument(gguf::printable_path(file.paths().front()) + ": no key " + gguf::quoted(bytes) +
                          " among its " + std::to_string(file.metadata().size()) + " keys");
  }
  return describe(*value);
}

py::list tensors(const File& file) {
  py::list list;
  for (const Tensor& tensor : file.tensors()) {
    py::tuple shape(tensor.n_dims);
    for (std::uint32_t d = 0; d < tensor.n_dims; ++d) shape[d] = tensor.dims[tensor.n_dims - 1 - d];
    list.append(TensorInfo{to_str(tensor.name), shape, std::string(traits(tensor.type).name),
                           tensor.data.size(), tensor.n_elements, tensor.offset, tensor.shard});
  }
  return list;
}

py::array tensor_data(const py::object& self, const py::str& name) {
  const auto& file = py::cast<const File&>(self);
  const std::string bytes = to_bytes(name);
  const Tensor* tensor = file.find_tensor(bytes);
  if (tensor == nullptr) {
    throw InvalidArgument(gguf::printable_path(file.paths().front()) + ": no tensor " + gguf::quoted(bytes) +
                          " among its " + std::to_string(file.tensors().size()) + " tensors");
  }
  // `self` as the base keeps the mapping; numpy does not let a view of it be made writeable again.
  py::array view(py::dtype::of<std::uint8_t>(), {tensor->data.size()}, {1}, tensor->data.data(), self);
  view.attr("setflags")(py::arg("write") = false);
  return view;
}

py::list paths(const File& file) {
  py::list list;
  for (const std::filesystem::path& path : file.paths()) list.append(py::cast(path).attr("__fspath__")());
  return list;
}

py::str repr(const File& file) {
  return to_str("<GGUF '" + gguf::printable_path(file.paths().front()) + "': version " +
                std::to_string(file.version()) + ", " + std::to_string(file.metadata().size()) + " keys, " +
                std::to_string(file.tensors().size()) + " tensors, " + std::to_string(file.file_bytes()) +
                " bytes>");
}

py::dict type_sizes() {
  py::dict sizes;
  for (const gguf::TypeTraits& t : gguf::all_types()) {
    sizes[py::cast(std::string(t.name))] =
        py::make_tuple(static_cast<std::uint32_t>(t.type), t.block_size, t.block_bytes);
  }
  return sizes;
}

std::vector<std::string> fast_types() {
  std::vector<std::string> names;
  for (const gguf::TypeTraits& t : gguf::all_types()) {
    if (cpu::can_pack(t.type)) names.emplace_back(t.name);
  }
  return names;
}

}  // namespace

void bind_gguf(py::module_& m) {
  py::class_<TensorInfo>(m, "GGUFTensor",
                         "What a GGUF file says about one tensor; tensor_data() has its bytes.")
      .def_readonly("name", &TensorInfo::name)
      .def_readonly("shape", &TensorInfo::shape, "As numpy would have it: the last dimension is contiguous.")
      .def_readonly("type", &TensorInfo::type, "As the field writes it, for example 'Q4_K'.")
      .def_readonly("nbytes", &TensorInfo::nbytes)
      .def_readonly("n_elements", &TensorInfo::n_elements)
      .def_readonly("offset", &TensorInfo::offset, "Of its first byte in its file.")
      .def_readonly("shard", &TensorInfo::shard, "Position of its file in GGUF.paths.")
      .def("__repr__", [](const TensorInfo& t) {
        return py::str("<GGUFTensor {!r}: {} {}>").format(t.name, t.type, t.shape);
      });

  py::class_<File, std::shared_ptr<File>>(m, "GGUF",
                                          R"(A GGUF file, or a set of split files, mapped read-only.

Opening checks every key, string, array and tensor against the size of the file, and turns nothing into Python
objects. Raises FileFormatError, UnsupportedModelError, or Error when a file cannot be opened or a part of a
split model is missing.)")
      .def(py::init([](const std::filesystem::path& path) {
             const NoGil no_gil;
             return std::make_shared<File>(File::open(path));
           }),
           py::arg("path"))
      .def_property_readonly("version", &File::version)
      .def_property_readonly("alignment", &File::alignment, "Of tensor data, in bytes.")
      .def_property_readonly("file_bytes", &File::file_bytes, "Size of all files together.")
      .def_property_readonly("paths", &paths, "All files, in order; more than one when the model is split.")
      .def("keys", &keys, "Metadata keys, in the order of the file.")
      .def("get", &get, py::arg("key"), py::arg("default") = py::none(),
           R"(The value of a key, or `default` when the file does not have it.

Numbers, bools and strings are Python's own; an array of strings is a list of str; an array of numbers or bools
is a new numpy array of its type. Bytes that are not UTF-8 become surrogates (error handler 'surrogateescape').)")
      .def("value_type", &value_type, py::arg("key"),
           "The type of a value, for example 'u32' or 'array[string]'. InvalidArgument when there is no such "
           "key.")
      .def("tensors", &tensors, "All tensors, in the order of the files.")
      .def("tensor_data", &tensor_data, py::arg("name"),
           R"(The bytes of a tensor as a read-only numpy view [nbytes] of uint8, which keeps the file mapped.

InvalidArgument when there is no such tensor.)")
      .def("__contains__",
           [](const File& file, const py::str& key) { return file.find(to_bytes(key)) != nullptr; })
      .def("__repr__", &repr);

  m.def("gguf_type_sizes", &type_sizes,
        "Every tensor type that can be read: name to (number in the file, elements a block, bytes a block).");
  m.def("fast_types", &fast_types,
        "Names of the tensor types whose matrix products have packed CPU kernels.");
}

}  // namespace ringlm::bindings

// ringlm._core.Session.
#include "ringlm/session.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "ringlm/error.h"

namespace py = pybind11;

namespace ringlm::bindings {
namespace {

KvFormat kv_format(const std::string& name) {
  if (name == "f32") return KvFormat::F32;
  if (name == "f16") return KvFormat::F16;
  throw InvalidArgument("K/V format is '" + name + "'; there are 'f32' and 'f16'");
}

const char* kv_name(KvFormat format) { return format == KvFormat::F32 ? "f32" : "f16"; }

// Where logits go: nowhere for None, else a contiguous float32 array of exactly this shape. Never a copy,
// which would be filled in vain.
std::span<float> writable(const py::object& out, const std::vector<py::ssize_t>& shape) {
  if (out.is_none()) return {};
  if (!py::isinstance<py::array>(out)) {
    throw py::type_error("out is of type " + std::string(Py_TYPE(out.ptr())->tp_name) +
                         "; expected a numpy array of float32");
  }
  auto array = py::reinterpret_borrow<py::array>(out);
  const auto refuse = [&](const std::string& found) {
    throw InvalidArgument("out is " + found + "; expected a writable C-contiguous array of float32 " +
                          py::str(py::tuple(py::cast(shape))).cast<std::string>());
  };
  if (!array.dtype().equal(py::dtype::of<float>()))
    refuse("of " + py::str(array.dtype()).cast<std::string>());
  if (!std::equal(shape.begin(), shape.end(), array.shape(), array.shape() + array.ndim()))
    refuse("of shape " + py::str(array.attr("shape")).cast<std::string>());
  if (!(array.flags() & py::array::c_style)) refuse("not contiguous");
  if (!array.writeable()) refuse("read-only");
  if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(float) != 0) refuse("not aligned");
  return {static_cast<float*>(array.mutable_data()), static_cast<std::size_t>(array.size())};
}

// The session compares with the vocabulary; here the number must only survive the narrowing.
std::int32_t token_id(const py::handle& token) {
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(token.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long id = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow || id != static_cast<std::int32_t>(id)) {
    throw InvalidArgument("token id " + py::str(number).cast<std::string>() + " does not fit 32 bits");
  }
  return static_cast<std::int32_t>(id);
}

// Ids from an integer array [n_tokens] (int32 without a copy) or from a sequence of integers.
class Tokens {
 public:
  explicit Tokens(const py::object& source) {
    if (py::isinstance<py::array>(source)) {
      const auto array = py::reinterpret_borrow<py::array>(source);
      if (array.ndim() != 1) {
        throw InvalidArgument("tokens have " + std::to_string(array.ndim()) + " dimensions; expected one");
      }
      if (const char kind = array.dtype().kind(); kind != 'i' && kind != 'u') {
        throw py::type_error("tokens are an array of " + py::str(array.dtype()).cast<std::string>() +
                             "; expected integers");
      }
      if (array.dtype().equal(py::dtype::of<std::int32_t>())) {
        array_ = py::array_t<std::int32_t, py::array::c_style>::ensure(array);
        if (!*array_) throw py::error_already_set();
        return;
      }
    } else if (!py::isinstance<py::sequence>(source) || py::isinstance<py::str>(source) ||
               py::isinstance<py::bytes>(source)) {
      throw py::type_error("tokens are of type " + std::string(Py_TYPE(source.ptr())->tp_name) +
                           "; expected a sequence of integers");
    }
    for (const py::handle item : source) list_.push_back(token_id(item));
  }

  std::span<const std::int32_t> ids() const {
    if (!array_) return list_;
    return {array_->data(), static_cast<std::size_t>(array_->size())};
  }

 private:
  std::optional<py::array_t<std::int32_t, py::array::c_style>> array_;
  std::vector<std::int32_t> list_;
};

void hear_signals() {
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::vector<py::ssize_t> row_shape(const Session& s) { return {s.model()->config().n_vocab}; }

void fill(const Session& s, std::span<float> out) {
  if (!out.empty()) std::ranges::copy(s.logits(), out.begin());
}

void prefill(Session& s, const py::object& tokens, const py::object& out, bool all_logits,
             const py::object& progress) {
  const Tokens source(tokens);
  const std::span<const std::int32_t> ids = source.ids();
  std::vector<py::ssize_t> shape = row_shape(s);
  if (all_logits) shape.insert(shape.begin(), static_cast<py::ssize_t>(ids.size()));
  if (all_logits && out.is_none()) throw InvalidArgument("all_logits needs an array `out` to write to");
  const std::span<float> logits = writable(out, shape);
  const auto between_chunks = [&](std::size_t done, std::size_t total) {
    const Gil gil;
    hear_signals();
    progress(done, total);
  };
  const NoGil no_gil;
  s.prefill(ids, all_logits ? logits : std::span<float>{},
            progress.is_none() ? Session::Progress{} : Session::Progress(between_chunks));
  if (!all_logits) fill(s, logits);
}

void decode(Session& s, const py::object& token, const py::object& out) {
  const std::int32_t id = token_id(token);
  const std::span<float> logits = writable(out, row_shape(s));
  const NoGil no_gil;
  s.decode(id);
  fill(s, logits);
}

}  // namespace

void bind_session(py::module_& m) {
  using Release = py::call_guard<NoGil>;
  py::class_<Session>(m, "Session")
      .def(py::init([](const ModelHandle& model, std::int64_t n_ctx, const std::string& k,
                       const std::string& v, std::int32_t chunk) {
             const auto poll = [] {
               const Gil gil;
               hear_signals();
             };
             const SessionOptions options{n_ctx, chunk, kv_format(k), kv_format(v), poll};
             const std::shared_ptr<const Model> shared = model.get();
             const NoGil no_gil;
             return std::make_unique<Session>(shared, options);
           }),
           py::arg("model"), py::arg("n_ctx") = 0, py::arg("kv_k") = "f16", py::arg("kv_v") = "f16",
           py::arg("chunk") = 128)
      .def("prefill", &prefill, py::arg("tokens"), py::arg("out") = py::none(), py::arg("all_logits") = false,
           py::arg("progress") = py::none())
      .def("decode", &decode, py::arg("token"), py::arg("out") = py::none())
      .def(
          "sample",
          [](const Session& s, PySampler& sampler) {
            return sampler.exclusively([&](Sampler& one) { return s.sample(one); });
          },
          py::arg("sampler"))
      .def(
          "log_probability",
          [](const Session& s, const py::object& token) {
            const std::int32_t id = token_id(token);
            const NoGil no_gil;
            return s.log_probability(id);
          },
          py::arg("id"))
      .def(
          "top_log_probabilities",
          [](const Session& s, std::int32_t k) {
            std::vector<LogProb> best;
            {
              const NoGil no_gil;
              best = s.top_log_probabilities(k);
            }
            py::list result;
            for (const LogProb& p : best) result.append(py::make_tuple(p.id, p.logprob));
            return result;
          },
          py::arg("k"))
      .def("rewind", &Session::rewind, py::arg("n"), Release())
      .def("cancel", &Session::cancel, py::arg("wanted") = true, Release())
      .def("close", &Session::close, Release())
      .def_property_readonly("closed", &Session::closed)
      .def_property_readonly("position", &Session::position)
      .def_property_readonly("tokens",
                             [](const Session& s) {
                               py::list ids;
                               for (const std::int32_t id : s.tokens()) ids.append(id);
                               return ids;
                             })
      .def_property_readonly("n_ctx", &Session::n_ctx)
      .def_property_readonly("chunk", &Session::chunk)
      .def_property_readonly(
          "kv", [](const Session& s) { return py::make_tuple(kv_name(s.k_format()), kv_name(s.v_format())); })
      .def_property_readonly("kv_nbytes", &Session::kv_bytes)
      .def_property_readonly("nbytes", &Session::nbytes);
}

}  // namespace ringlm::bindings

// ringlm._core.Session.
#include "ringlm/session.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "ringlm/error.h"

namespace py = pybind11;

namespace ringlm::bindings {
namespace {

using Tokens = py::array_t<std::int32_t, py::array::c_style>;
using Logits = py::array_t<float, py::array::c_style>;

KvFormat kv_format(const std::string& name) {
  if (name == "f32") return KvFormat::F32;
  if (name == "f16") return KvFormat::F16;
  throw InvalidArgument("K/V format is '" + name + "'; there are 'f32' and 'f16'");
}

const char* kv_name(KvFormat format) { return format == KvFormat::F32 ? "f32" : "f16"; }

std::span<float> writable(std::optional<Logits>& out) {
  if (!out) return {};
  return {out->mutable_data(), static_cast<std::size_t>(out->size())};
}

// Copies the last logits out, if somebody asked for them.
void fill(const Session& s, std::span<float> out) {
  if (out.empty()) return;
  const std::span<const float> logits = s.logits();
  if (out.size() != logits.size()) {
    throw InvalidArgument("out has " + std::to_string(out.size()) +
                          " elements; expected n_vocab = " + std::to_string(logits.size()));
  }
  std::copy(logits.begin(), logits.end(), out.begin());
}

void check_size(const Session& s, std::span<float> out) {
  const auto n = static_cast<std::size_t>(s.model()->config().n_vocab);
  if (!out.empty() && out.size() != n) {
    throw InvalidArgument("out has " + std::to_string(out.size()) +
                          " elements; expected n_vocab = " + std::to_string(n));
  }
}

void prefill(Session& s, const Tokens& tokens, std::optional<Logits> out, bool all_logits,
             const py::object& progress) {
  const std::span<const std::int32_t> ids(tokens.data(), static_cast<std::size_t>(tokens.size()));
  const std::span<float> logits = writable(out);
  if (!all_logits) check_size(s, logits);
  // Behind every chunk: Ctrl-C is heard, and whoever watches is told. What is raised there ends the prefill.
  const auto between_chunks = [&](std::size_t done, std::size_t total) {
    py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!progress.is_none()) progress(done, total);
  };
  py::gil_scoped_release release;
  s.prefill(ids, all_logits ? logits : std::span<float>{}, between_chunks);
  if (!all_logits) fill(s, logits);
}

void decode(Session& s, std::int32_t token, std::optional<Logits> out) {
  const std::span<float> logits = writable(out);
  check_size(s, logits);
  py::gil_scoped_release release;
  s.decode(token);
  fill(s, logits);
}

}  // namespace

void bind_session(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Session>(m, "Session")
      .def(py::init([](const ModelHandle& model, std::int64_t n_ctx, const std::string& k,
                       const std::string& v, std::int32_t chunk) {
             const SessionOptions options{n_ctx, chunk, kv_format(k), kv_format(v)};
             const std::shared_ptr<const Model> shared = model.get();
             py::gil_scoped_release release;
             return std::make_unique<Session>(shared, options);
           }),
           py::arg("model"), py::arg("n_ctx") = 0, py::arg("kv_k") = "f16", py::arg("kv_v") = "f16",
           py::arg("chunk") = 128)
      .def("prefill", &prefill, py::arg("tokens"), py::arg("out").noconvert() = py::none(), py::arg("all_logits") = false,
           py::arg("progress") = py::none())
      .def("decode", &decode, py::arg("token"), py::arg("out").noconvert() = py::none())
      .def(
          "sample",
          [](const Session& s, PySampler& sampler) {
            return sampler.exclusively([&](Sampler& one) { return s.sample(one); });
          },
          py::arg("sampler"))
      .def("log_probability", &Session::log_probability, py::arg("id"), Release())
      .def(
          "top_log_probabilities",
          [](const Session& s, std::int32_t k) {
            py::list result;
            for (const LogProb& p : s.top_log_probabilities(k))
              result.append(py::make_tuple(p.id, p.logprob));
            return result;
          },
          py::arg("k"))
      .def("rewind", &Session::rewind, py::arg("n"), Release())
      .def("cancel", &Session::cancel, Release())
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

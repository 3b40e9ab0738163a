// ringlm._core.Session.
#include "ringlm/session.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "kv/ring.h"
#include "ringlm/error.h"

namespace py = pybind11;

namespace ringlm::bindings {
namespace {

KvFormat kv_format(const std::string& name) {
  if (name == "f32") return KvFormat::F32;
  if (name == "f16") return KvFormat::F16;
  if (name == "int8") return KvFormat::Int8;
  throw InvalidArgument("K/V format is '" + name + "'; there are 'f32', 'f16' and 'int8'");
}

const char* kv_name(KvFormat format) {
  return format == KvFormat::F32 ? "f32" : format == KvFormat::F16 ? "f16" : "int8";
}

Overflow overflow_rule(const std::string& name) {
  if (name == "error") return Overflow::Error;
  if (name == "slide") return Overflow::Slide;
  throw InvalidArgument("overflow is '" + name + "'; there are 'error' and 'slide'");
}

// Where logits go: nowhere for None, else a contiguous float32 array of exactly this shape. Never a copy,
// which would be filled in vain.
std::span<float> writable(const py::object& out, std::span<const py::ssize_t> shape) {
  if (out.is_none()) return {};
  if (!py::isinstance<py::array>(out)) {
    throw py::type_error("out is of type " + std::string(Py_TYPE(out.ptr())->tp_name) +
                         "; expected a numpy array of float32");
  }
  auto array = py::reinterpret_borrow<py::array>(out);
  const auto refuse = [&](const std::string& found) {
    throw InvalidArgument(
        "out is " + found + "; expected a writable C-contiguous array of float32 " +
        py::str(py::tuple(py::cast(std::vector(shape.begin(), shape.end())))).cast<std::string>());
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

void prefill(Session& s, const py::object& tokens, const py::object& out, bool all_logits,
             const py::object& progress) {
  const Tokens source(tokens);
  const std::span<const std::int32_t> ids = source.ids();
  const std::array<py::ssize_t, 2> shape{static_cast<py::ssize_t>(ids.size()), s.model()->config().n_vocab};
  if (all_logits && out.is_none()) throw InvalidArgument("all_logits needs an array `out` to write to");
  const std::span<float> logits = writable(out, std::span(shape).subspan(all_logits ? 0 : 1));
  const auto between_chunks = [&](std::size_t done, std::size_t total) {
    const Gil gil;
    hear_signals();
    progress(done, total);
  };
  const NoGil no_gil;
  s.prefill(ids, logits, progress.is_none() ? Session::Progress{} : Session::Progress(between_chunks));
}

void decode(Session& s, const py::object& token, const py::object& out) {
  const std::int32_t id = token_id(token);
  const std::span<float> logits = writable(out, std::array<py::ssize_t, 1>{s.model()->config().n_vocab});
  const NoGil no_gil;
  s.decode(id, logits);
}

py::list kinds_list(const SessionPlan& plan) {
  py::list kinds;
  for (const LayerKind& k : plan.kinds) {
    py::dict d;
    d["window"] = k.window;
    d["n_layer"] = k.n_layer;
    d["visible"] = k.visible;
    d["pinned"] = k.pinned;
    d["capacity"] = k.capacity;
    d["nbytes"] = k.nbytes;
    kinds.append(d);
  }
  return kinds;
}

py::dict plan_dict(const SessionPlan& plan) {
  py::dict d;
  d["n_ctx"] = plan.options.n_ctx;
  d["chunk"] = plan.options.chunk;
  d["pinned"] = plan.options.pinned;
  d["kinds"] = kinds_list(plan);
  d["kv_nbytes"] = plan.kv_bytes;
  d["activation_nbytes"] = plan.activation_bytes;
  d["scratch_nbytes"] = plan.scratch_bytes;
  d["state_nbytes"] = plan.state_bytes;
  d["nbytes"] = plan.nbytes;
  return d;
}

constexpr std::size_t kPiece = 1 << 20;  // bytes that Python gets or gives at once

void save(const Session& s, const py::function& write) {
  const NoGil no_gil;
  s.save([&](std::span<const std::byte> all) {
    for (std::size_t at = 0; at < all.size(); at += kPiece) {
      const auto piece = all.subspan(at, std::min(kPiece, all.size() - at));
      const Gil gil;
      write(py::bytes(reinterpret_cast<const char*>(piece.data()), piece.size()));
    }
  });
}

void hear_signals_between_layers() {
  const Gil gil;
  hear_signals();
}

std::unique_ptr<Session> load(const ModelHandle& model, const py::function& read) {
  const std::shared_ptr<const Model> shared = model.get();
  const NoGil no_gil;
  return Session::load(
      shared,
      [&](std::span<std::byte> all) {
        for (std::size_t at = 0; at < all.size(); at += kPiece) {
          const auto piece = all.subspan(at, std::min(kPiece, all.size() - at));
          const Gil gil;
          const auto bytes = read(piece.size()).cast<std::string_view>();
          if (bytes.size() != piece.size()) {
            throw FileFormatError("the saved session is truncated: of " + std::to_string(piece.size()) +
                                  " bytes that belong here there are " + std::to_string(bytes.size()));
          }
          std::memcpy(piece.data(), bytes.data(), bytes.size());
        }
      },
      hear_signals_between_layers);
}

py::tuple kv_rows(const Session& s, std::int32_t layer, std::int32_t head) {
  KvRows rows;
  {
    const NoGil no_gil;
    rows = s.kv_rows(layer, head);
  }
  const auto n = static_cast<py::ssize_t>(rows.positions.size());
  const py::ssize_t d = s.model()->config().head_dim;
  return py::make_tuple(py::array_t<std::int64_t>(n, rows.positions.data()),
                        py::array_t<float>({n, d}, rows.k.data()), py::array_t<float>({n, d}, rows.v.data()));
}

py::list take_trace(Session& s) {
  const std::vector<TraceRecord> records = s.take_trace();
  const std::vector<LayerKind> kinds = s.plan().kinds;
  const LayerKind& widest =
      *std::ranges::max_element(kinds, {}, [](const LayerKind& k) { return k.capacity; });
  const kv::Ring ring{widest.visible, widest.pinned, widest.capacity};
  py::list list;
  for (const TraceRecord& r : records) {
    py::list visible;
    for (const LayerKind& k : kinds) visible.append(std::min(r.position + r.n_tokens, k.visible));
    py::dict operations, operation_bytes;
    for (std::size_t i = 0; i < kOperations.size(); ++i) {
      operations[kOperations[i]] = r.operation_seconds[i];
      operation_bytes[kOperations[i]] = r.operation_bytes[i];
    }
    py::dict d;
    d["kind"] = r.kind == StepKind::Prefill ? "prefill" : r.kind == StepKind::Decode ? "decode" : "rebuild";
    d["position"] = r.position;
    d["n_tokens"] = r.n_tokens;
    d["slot"] = ring.slot(r.position);
    d["visible"] = visible;
    d["weight_bytes"] = r.weight_bytes;
    d["kv_bytes"] = r.kv_bytes;
    d["seconds"] = r.seconds;
    d["operations"] = operations;
    d["operation_bytes"] = operation_bytes;
    d["allocations"] = r.allocations;
    list.append(d);
  }
  return list;
}

// None, or the exception of each session. One that is no error (KeyboardInterrupt) is raised.
py::list step_all(const std::vector<Session*>& sessions, const std::vector<py::object>& tokens) {
  std::vector<std::int32_t> ids;
  for (const py::object& token : tokens) ids.push_back(token_id(token));
  std::vector<std::exception_ptr> errors;
  {
    const NoGil no_gil;
    errors = step(sessions, ids);
  }
  py::list result;
  for (const std::exception_ptr& error : errors) {
    if (!error) {
      result.append(py::none());
      continue;
    }
    set_python_error(error);
    py::error_already_set set;
    if (!PyErr_GivenExceptionMatches(set.value().ptr(), PyExc_Exception)) throw set;
    result.append(set.value());
  }
  return result;
}

SessionOptions session_options(std::int64_t n_ctx, const std::string& k, const std::string& v,
                               std::int32_t chunk, std::int64_t pinned, const std::string& overflow) {
  return {.n_ctx = n_ctx,
          .chunk = chunk,
          .k_format = kv_format(k),
          .v_format = kv_format(v),
          .pinned = pinned,
          .overflow = overflow_rule(overflow)};
}

}  // namespace

void bind_session(py::module_& m) {
  using Release = py::call_guard<NoGil>;
  py::class_<Session>(m, "Session")
      .def(py::init([](const ModelHandle& model, std::int64_t n_ctx, const std::string& k,
                       const std::string& v, std::int32_t chunk, std::int64_t pinned,
                       const std::string& overflow) {
             SessionOptions options = session_options(n_ctx, k, v, chunk, pinned, overflow);
             options.poll = hear_signals_between_layers;
             const std::shared_ptr<const Model> shared = model.get();
             const NoGil no_gil;
             return std::make_unique<Session>(shared, options);
           }),
           py::arg("model"), py::arg("n_ctx") = 0, py::arg("kv_k") = "f16", py::arg("kv_v") = "f16",
           py::arg("chunk") = 128, py::arg("pinned") = 0, py::arg("overflow") = "error")
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
      .def(
          "reuse",
          [](Session& s, const py::object& tokens) {
            const Tokens source(tokens);
            const NoGil no_gil;
            return s.reuse(source.ids());
          },
          py::arg("tokens"))
      .def("fork", &Session::fork, Release())
      .def("save", &save, py::arg("write"))
      .def_static("load", &load, py::arg("model"), py::arg("read"))
      .def("kv_rows", &kv_rows, py::arg("layer"), py::arg("head"))
      .def(
          "start_trace",
          [](Session& s, std::size_t capacity) {
            const NoGil no_gil;
            s.start_trace(capacity, heap_allocations);
          },
          py::arg("capacity"))
      .def("take_trace", &take_trace)
      .def("cancel", &Session::cancel, py::arg("wanted") = true, Release())
      .def("close", &Session::close, Release())
      .def_property_readonly("closed", &Session::closed)
      .def_property_readonly("position", &Session::position)
      .def_property_readonly("visible", &Session::visible)
      .def_property_readonly("evicted", [](const Session& s) { return s.position() - s.visible(); })
      .def_property_readonly("slots", &Session::slots)
      .def_property_readonly("tokens",
                             [](const Session& s) {
                               py::list ids;
                               for (const std::int32_t id : s.tokens()) ids.append(id);
                               return ids;
                             })
      .def_property_readonly("n_ctx", &Session::n_ctx)
      .def_property_readonly("chunk", &Session::chunk)
      .def_property_readonly("pinned", &Session::pinned)
      .def_property_readonly(
          "overflow", [](const Session& s) { return s.overflow() == Overflow::Slide ? "slide" : "error"; })
      .def_property_readonly("kinds", [](const Session& s) { return kinds_list(s.plan()); })
      .def_property_readonly(
          "kv", [](const Session& s) { return py::make_tuple(kv_name(s.k_format()), kv_name(s.v_format())); })
      .def_property_readonly("kv_nbytes", &Session::kv_bytes)
      .def_property_readonly("nbytes", &Session::nbytes);

  m.def("step", &step_all, py::arg("sessions"), py::arg("tokens"));
  m.def(
      "plan",
      [](const ModelHandle& model, std::int64_t n_ctx, const std::string& k, const std::string& v,
         std::int32_t chunk, std::int64_t pinned, const std::string& overflow) {
        return plan_dict(plan_session(*model.get(), session_options(n_ctx, k, v, chunk, pinned, overflow)));
      },
      py::arg("model"), py::arg("n_ctx") = 0, py::arg("kv_k") = "f16", py::arg("kv_v") = "f16",
      py::arg("chunk") = 128, py::arg("pinned") = 0, py::arg("overflow") = "error");
  m.def(
      "largest_n_ctx",
      [](const ModelHandle& model, const std::string& k, const std::string& v, std::int32_t chunk,
         std::int64_t pinned, std::size_t memory) {
        return largest_n_ctx(*model.get(), session_options(0, k, v, chunk, pinned, "error"), memory);
      },
      py::arg("model"), py::arg("kv_k"), py::arg("kv_v"), py::arg("chunk"), py::arg("pinned"),
      py::arg("memory"));
  m.def("heap_allocations", &heap_allocations);
}

}  // namespace ringlm::bindings

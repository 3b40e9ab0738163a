// ringlm::Sampler and the log-probability functions, for numpy arrays.
#include "ringlm/sampler.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "ringlm/error.h"

namespace py = pybind11;

namespace ringlm::bindings {
namespace {

using Row = py::array_t<float, py::array::c_style>;

// A float32 array [n]; copied only where it is not contiguous.
Row float_row(const py::object& o) {
  if (!py::isinstance<py::array>(o)) {
    throw py::type_error("logits are of type " + std::string(Py_TYPE(o.ptr())->tp_name) +
                         "; expected a numpy array of float32 [n_vocab]");
  }
  const auto array = py::reinterpret_borrow<py::array>(o);
  if (!array.dtype().equal(py::dtype::of<float>())) {
    throw py::type_error("logits are an array of " + py::str(array.dtype()).cast<std::string>() +
                         "; expected float32 (convert with .astype(numpy.float32))");
  }
  if (array.ndim() != 1) {
    throw InvalidArgument("logits have " + std::to_string(array.ndim()) +
                          " dimensions; expected one, [n_vocab]");
  }
  auto row = Row::ensure(array);
  if (!row) throw py::error_already_set();
  return row;
}

std::span<const float> span_of(const Row& row) { return {row.data(), static_cast<std::size_t>(row.size())}; }

std::int32_t int32(const char* name, std::int64_t value) {
  if (value < std::numeric_limits<std::int32_t>::min() || value > std::numeric_limits<std::int32_t>::max()) {
    throw InvalidArgument(std::string(name) + " is " + std::to_string(value) +
                          "; expected a number that fits 32 bits");
  }
  return static_cast<std::int32_t>(value);
}

std::uint64_t seed_of(const py::int_& seed) {
  const std::uint64_t value = PyLong_AsUnsignedLongLong(seed.ptr());
  if (PyErr_Occurred()) {
    PyErr_Clear();
    throw InvalidArgument("seed is " + py::str(seed).cast<std::string>() + "; expected 0 to 2**64 - 1");
  }
  return value;
}

py::dict dict_of(const SamplerParams& p) {
  py::dict bias;
  for (const auto& [id, value] : p.logit_bias) bias[py::int_(id)] = value;
  py::dict d;
  d["temperature"] = p.temperature;
  d["top_k"] = p.top_k;
  d["top_p"] = p.top_p;
  d["min_p"] = p.min_p;
  d["repetition_penalty"] = p.repetition_penalty;
  d["presence_penalty"] = p.presence_penalty;
  d["frequency_penalty"] = p.frequency_penalty;
  d["penalty_window"] = p.penalty_window;
  d["logit_bias"] = bias;
  d["seed"] = p.seed;
  return d;
}

}  // namespace

void bind_sampler(py::module_& m) {
  const SamplerParams defaults;
  py::class_<PySampler>(m, "Sampler",
                        "From logits to a token; holds the random state and the penalty window of one text.")
      .def(
          py::init([](std::int64_t n_vocab, double temperature, std::int64_t top_k, double top_p,
                      double min_p, double repetition_penalty, double presence_penalty,
                      double frequency_penalty, std::int64_t penalty_window,
                      const std::optional<std::map<std::int64_t, double>>& logit_bias, const py::int_& seed) {
            SamplerParams p;
            p.temperature = temperature;
            p.top_k = int32("top_k", top_k);
            p.top_p = top_p;
            p.min_p = min_p;
            p.repetition_penalty = repetition_penalty;
            p.presence_penalty = presence_penalty;
            p.frequency_penalty = frequency_penalty;
            p.penalty_window = int32("penalty_window", penalty_window);
            if (logit_bias) {
              for (const auto& [id, bias] : *logit_bias) {
                p.logit_bias.emplace_back(int32("a token id of logit_bias", id), bias);
              }
            }
            p.seed = seed_of(seed);
            return std::make_unique<PySampler>(int32("n_vocab", n_vocab), std::move(p));
          }),
          py::arg("n_vocab"), py::kw_only(), py::arg("temperature") = defaults.temperature,
          py::arg("top_k") = defaults.top_k, py::arg("top_p") = defaults.top_p,
          py::arg("min_p") = defaults.min_p, py::arg("repetition_penalty") = defaults.repetition_penalty,
          py::arg("presence_penalty") = defaults.presence_penalty,
          py::arg("frequency_penalty") = defaults.frequency_penalty,
          py::arg("penalty_window") = defaults.penalty_window, py::arg("logit_bias") = py::none(),
          py::arg("seed") = defaults.seed)
      .def(
          "sample",
          [](PySampler& self, const py::object& logits) {
            const Row row = float_row(logits);
            return self.exclusively([x = span_of(row)](Sampler& s) { return s.sample(x); });
          },
          py::arg("logits"), "Draws a token from float32 logits [n_vocab] and enters it into the window.")
      .def(
          "accept",
          [](PySampler& self, const std::vector<std::int64_t>& ids) {
            std::vector<std::int32_t> tokens;
            tokens.reserve(ids.size());
            for (const std::int64_t id : ids) tokens.push_back(int32("a token id", id));
            self.exclusively([&](Sampler& s) { s.accept(tokens); });
          },
          py::arg("ids"), "Enters tokens into the penalty window without drawing.")
      .def(
          "reset", [](PySampler& self) { self.exclusively([](Sampler& s) { s.reset(); }); },
          "Back to the seed, with an empty window.")
      .def(
          "copy",
          [](PySampler& self) {
            return std::make_unique<PySampler>(self.exclusively([](Sampler& s) { return s; }));
          },
          "A sampler that continues on its own with the same random state and window.")
      .def_property_readonly("n_vocab", [](const PySampler& self) { return self.get().n_vocab(); })
      .def_property_readonly("params", [](const PySampler& self) { return dict_of(self.get().params()); });

  m.def(
      "argmax",
      [](const py::object& logits) {
        const Row row = float_row(logits);
        const auto x = span_of(row);
        const NoGil no_gil;
        return argmax(x);
      },
      py::arg("logits"), "Index of the largest logit, the lowest one of equals.");
  m.def(
      "log_probability",
      [](const py::object& logits, std::int64_t id) {
        const Row row = float_row(logits);
        const auto x = span_of(row);
        const std::int32_t token = int32("token id", id);
        const NoGil no_gil;
        return log_probability(x, token);
      },
      py::arg("logits"), py::arg("id"), "Natural logarithm of the probability of one token.");
  m.def(
      "top_log_probabilities",
      [](const py::object& logits, std::int64_t k) {
        const Row row = float_row(logits);
        const auto x = span_of(row);
        const std::int32_t n = int32("k", k);
        std::vector<LogProb> best;
        {
          const NoGil no_gil;
          best = top_log_probabilities(x, n);
        }
        std::vector<std::pair<std::int32_t, float>> pairs;
        pairs.reserve(best.size());
        for (const LogProb& p : best) pairs.emplace_back(p.id, p.logprob);
        return pairs;
      },
      py::arg("logits"), py::arg("k"), "The k most probable tokens as (id, log-probability), best first.");
}

}  // namespace ringlm::bindings

// ringlm._core.Config and Model, and the dequantization of single tensors.
#include "ringlm/model.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "decoder/cuda_library.h"
#include "gguf/blocks.h"
#include "ringlm/error.h"

namespace py = pybind11;

namespace ringlm::bindings {

std::shared_ptr<const Model> ModelHandle::get() const {
  if (!model) throw StateError("the model is closed: open it again with Model(path)");
  return model;
}

namespace {

constexpr std::pair<const char*, RopeScaling> kScalings[] = {
    {"none", RopeScaling::None},          {"linear", RopeScaling::Linear}, {"ntk", RopeScaling::Ntk},
    {"dynamic", RopeScaling::DynamicNtk}, {"yarn", RopeScaling::Yarn},     {"llama3", RopeScaling::Llama3},
    {"longrope", RopeScaling::LongRope}};

const char* scaling_name(RopeScaling scaling) {
  return std::ranges::find(kScalings, scaling, &std::pair<const char*, RopeScaling>::second)->first;
}

// A dict with the fields of Rope, checked by ringlm.rope.
Rope rope_from(const py::dict& d) {
  Rope r;
  const std::string name = d["scaling"].cast<std::string>();
  const auto* found = std::ranges::find(kScalings, name, &std::pair<const char*, RopeScaling>::first);
  if (found == std::end(kScalings)) throw InvalidArgument("rope: there is no scaling '" + name + "'");
  r.scaling = found->second;
  const std::pair<const char*, double*> numbers[] = {{"base", &r.base},
                                                     {"factor", &r.factor},
                                                     {"original", &r.original},
                                                     {"attn_factor", &r.attn_factor},
                                                     {"beta_fast", &r.beta_fast},
                                                     {"beta_slow", &r.beta_slow},
                                                     {"low_freq_factor", &r.low_freq_factor},
                                                     {"high_freq_factor", &r.high_freq_factor}};
  r.base = r.factor = 0.0;  // the file's, and what the scaling's default is
  for (const auto& [key, to] : numbers) {
    if (d.contains(key)) *to = d[key].cast<double>();
  }
  if (d.contains("factors")) r.factors = d["factors"].cast<std::vector<float>>();
  if (d.contains("long_factors")) r.long_factors = d["long_factors"].cast<std::vector<float>>();
  return r;
}

}  // namespace

void bind_model(py::module_& m) {
  py::class_<Config>(m, "Config")
      .def_readonly("architecture", &Config::architecture)
      .def_readonly("name", &Config::name)
      .def_readonly("n_vocab", &Config::n_vocab)
      .def_readonly("n_embd", &Config::n_embd)
      .def_readonly("n_layer", &Config::n_layer)
      .def_readonly("n_head", &Config::n_head)
      .def_readonly("n_head_kv", &Config::n_head_kv)
      .def_readonly("head_dim", &Config::head_dim)
      .def_readonly("n_ff", &Config::n_ff)
      .def_readonly("n_ctx_train", &Config::n_ctx_train)
      .def_readonly("rope_dims", &Config::rope_dims)
      .def_readonly("n_ctx_limit", &Config::n_ctx_limit)
      .def_readonly("n_expert", &Config::n_expert)
      .def_readonly("n_expert_used", &Config::n_expert_used)
      .def_property_readonly("rope_base", [](const Config& c) { return c.ropes.front().base; })
      .def_property_readonly("rope_factor", [](const Config& c) { return c.ropes.front().factor; })
      .def_property_readonly("rope_scaling",
                             [](const Config& c) { return scaling_name(c.ropes.front().scaling); })
      .def_readonly("norm_eps", &Config::norm_eps)
      .def_readonly("windows", &Config::windows)
      .def_property_readonly("group", &Config::group);

  py::class_<ModelHandle>(m, "Model")
      .def(py::init([](const std::filesystem::path& path, int n_threads, const std::string& backend,
                       const std::vector<std::int32_t>& window, const std::optional<py::dict>& rope,
                       bool repack) {
             ModelOptions options{n_threads, backend, window, {}, repack};
             if (rope) options.rope = rope_from(*rope);
             const NoGil no_gil;
             return ModelHandle{Model::open(path, options)};
           }),
           py::arg("path"), py::arg("n_threads") = 0, py::arg("backend") = "cpu",
           py::arg("window") = std::vector<std::int32_t>{}, py::arg("rope") = py::none(),
           py::arg("repack") = true)
      .def_property_readonly("config", [](const ModelHandle& h) { return h.get()->config(); })
      .def_property_readonly(
          "path",
          [](const ModelHandle& h) { return py::cast(h.get()->paths().front()).attr("__fspath__")(); })
      .def_property_readonly("n_threads", [](const ModelHandle& h) { return h.get()->n_threads(); })
      .def_property_readonly("backend", [](const ModelHandle& h) { return h.get()->backend(); })
      .def_property_readonly("nbytes", [](const ModelHandle& h) { return h.get()->weight_bytes(); })
      .def_property_readonly("packed_nbytes", [](const ModelHandle& h) { return h.get()->packed_bytes(); })
      .def_property_readonly("shared_nbytes", [](const ModelHandle& h) { return h.get()->shared_bytes(); })
      .def("available_memory", [](const ModelHandle& h) { return h.get()->available_memory(); })
      .def_property_readonly("closed", [](const ModelHandle& h) { return h.model == nullptr; })
      .def("close", [](ModelHandle& h) { h.model.reset(); });

  m.def("cuda_library", [] {
    const CudaLibrary& library = cuda_library();
    return std::pair(library.path.string(), library.entry->archs);
  });

  m.def(
      "dequantize",
      [](std::uint32_t type, const py::array_t<std::uint8_t, py::array::c_style>& data) {
        const gguf::TypeTraits* t = gguf::find_type(type);
        if (!t) throw InvalidArgument("tensor type " + std::to_string(type) + " is not known");
        const std::span<const std::byte> src(reinterpret_cast<const std::byte*>(data.data()),
                                             static_cast<std::size_t>(data.size()));
        py::array_t<float> out(static_cast<py::ssize_t>(src.size() / t->block_bytes * t->block_size));
        dequantize(t->type, src, {out.mutable_data(), static_cast<std::size_t>(out.size())});
        return out;
      },
      py::arg("type"), py::arg("data"), "Blocks of one tensor type (GGUF number) as float32.");
}

}  // namespace ringlm::bindings

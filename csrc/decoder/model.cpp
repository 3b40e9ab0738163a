#include "ringlm/model.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "cpu/cpu_ops.h"
#include "decoder/cuda_library.h"
#include "decoder/model_parts.h"
#include "host/memory.h"
#include "model/config.h"
#include "model/rope.h"
#include "ops/reference.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::unique_ptr<Ops> make_ops(const Config& config, const Weights& weights, const ModelOptions& options) {
  if (options.backend == "cpu") return make_cpu_ops(config, weights, {options.n_threads, options.repack});
  if (options.backend == "cuda") return cuda_library().entry->open(config, weights);
  if (options.backend == "reference") return make_reference_ops();
  throw InvalidArgument("backend is '" + options.backend + "'; there are 'cpu', 'cuda' and 'reference'");
}

// What the caller says instead of the file.
void set_windows(Config& config, const std::vector<std::int32_t>& windows) {
  if (windows.empty()) return;
  const auto n_layer = static_cast<std::size_t>(config.n_layer);
  if (windows.size() != 1 && windows.size() != n_layer) {
    throw InvalidArgument("there are " + std::to_string(windows.size()) +
                          " attention windows; expected one for all " + std::to_string(n_layer) +
                          " layers, or as many as layers");
  }
  for (const std::int32_t w : windows) {
    if (w < 0)
      throw InvalidArgument("an attention window is " + std::to_string(w) +
                            "; expected tokens, or 0 for none");
  }
  config.windows = windows.size() == 1 ? std::vector(n_layer, windows.front()) : windows;
}

}  // namespace

std::shared_ptr<const Model> Model::open(const std::filesystem::path& path, const ModelOptions& options) {
  if (options.n_threads < 0 || options.n_threads > 1024) {
    throw InvalidArgument("n_threads is " + std::to_string(options.n_threads) +
                          "; expected 1 to 1024, or 0 for all");
  }
  gguf::File file = gguf::File::open(path);
  Config config = read_config(file);
  set_windows(config, options.windows);
  if (options.rope) set_rope(config, *options.rope);
  Weights weights = bind_weights(file, config);
  Ropes ropes(config);
  auto parts = std::make_unique<Parts>(
      Parts{std::move(file), std::move(config), std::move(weights), std::move(ropes), nullptr, ::getpid()});
  parts->ops = make_ops(parts->config, parts->weights, options);  // which may keep references to both
  return std::shared_ptr<const Model>(new Model(std::move(parts)));
}

bool Model::Parts::in_this_process() const { return ::getpid() == owner; }

void Model::Parts::check_process() const {
  if (in_this_process()) return;
  throw StateError("the model was opened in process " + std::to_string(owner) +
                   " and its threads did not follow into process " + std::to_string(::getpid()) +
                   ", made by fork(): open the model again in the child, or start it with 'spawn'");
}

Model::Model(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Model::~Model() = default;

const Config& Model::config() const noexcept { return parts_->config; }
std::span<const std::filesystem::path> Model::paths() const noexcept { return parts_->file.paths(); }
std::size_t Model::weight_bytes() const noexcept {
  return parts_->ops->packed() ? parts_->ops->packed_bytes() : parts_->weights.nbytes;
}
std::size_t Model::packed_bytes() const noexcept { return parts_->ops->packed_bytes(); }
std::size_t Model::shared_bytes() const noexcept {
  const Weights& w = parts_->weights;
  std::size_t bytes = w.output_norm.size() * sizeof(float);
  for (const LayerWeights& layer : w.layers) bytes += layer.vector_bytes();
  return bytes + parts_->ops->scratch_bytes();
}
std::size_t Model::available_memory() const {
  const Device* device = parts_->ops->device();
  return device ? device->available() : host::available_memory();
}
int Model::n_threads() const noexcept { return parts_->ops->n_threads(); }
std::string Model::backend() const { return parts_->ops->name(); }

}  // namespace ringlm

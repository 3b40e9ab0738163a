// A library as cuda/library.h describes it, without CUDA: the plain reference backend, or the error that the
// model's name asks for.
#include "cuda/library.h"
#include "ops/reference.h"
#include "ringlm/error.h"

namespace {

std::unique_ptr<ringlm::Ops> open(const ringlm::Config& config, const ringlm::Weights&) {
  if (config.name == "OutOfMemory") throw ringlm::OutOfMemory("too little");
  if (config.name == "DeviceError") throw ringlm::DeviceError("no driver");
  if (config.name == "UnsupportedModelError") throw ringlm::UnsupportedModelError("no kernel");
  return ringlm::make_reference_ops();
}

constexpr ringlm::cuda::Library kLibrary{RINGLM_BUILD, "75 87", open};

}  // namespace

const ringlm::cuda::Library* ringlm_cuda_library() { return &kLibrary; }

// The door of libringlm_cuda.so. The CUDA backend is a library of its own, which the core loads when a model
// first asks for it (decoder/cuda_library.h): ringlm needs neither toolkit nor driver to be installed and
// imported. The library has its own copy of what it uses of the core; what crosses the door are the types of
// ops/ops.h and the errors of ringlm/error.h, by their layout, so both sides must come from one build.
#pragma once

#include <memory>

#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/config.h"

namespace ringlm::cuda {

constexpr const char* kLibraryFile = "libringlm_cuda.so";
constexpr const char* kLibraryEntry = "ringlm_cuda_library";

struct Library {
  const char* build;  // RINGLM_BUILD of the library. First, for ever: nothing else is read where it differs
  const char* archs;  // RINGLM_CUDA_ARCHS

  // Throws DeviceError (no driver, no GPU, one that the library has no code for, a failed call: with CUDA's
  // name of the error), OutOfMemory, UnsupportedModelError. Both arguments must outlive what it returns.
  std::unique_ptr<Ops> (*open)(const Config& config, const Weights& weights);
};

}  // namespace ringlm::cuda

extern "C" [[gnu::visibility("default")]] const ringlm::cuda::Library* ringlm_cuda_library();

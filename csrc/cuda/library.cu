// The entry of the library, and whether this machine can run what is in it.
#include "cuda/library.h"

#include <cstdlib>
#include <string>
#include <string_view>

#include "cuda/cuda_ops.h"
#include "cuda/port.h"
#include "cuda/runtime.h"
#include "ringlm/error.h"

namespace ringlm::cuda {
namespace {

// Compiled for the same architectures as every kernel.
__global__ void probe() {}

// CUDA's version numbers are 1000 major + 10 minor.
std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

std::string named(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

const char* const kInstead = "; or use device='cpu'";

void check_driver() {
  int n_gpus = 0;
  const cudaError_t error = cudaGetDeviceCount(&n_gpus);
  if (error == cudaSuccess && n_gpus > 0) return;
  int driver = 0;
  cudaDriverGetVersion(&driver);
  const std::string needed = "this library was built with CUDA " + version(CUDART_VERSION);
  if (driver == 0) {
    throw DeviceError("there is no NVIDIA driver on this machine (" + named(error) + "): install one; " +
                      needed + kInstead);
  }
  if (error == cudaErrorInsufficientDriver) {
    throw DeviceError("the NVIDIA driver is too old (" + named(error) + "): it knows CUDA " +
                      version(driver) + ", and " + needed +
                      ": update the driver, or build ringlm with an older toolkit" + kInstead);
  }
  if (error == cudaErrorNoDevice || error == cudaSuccess) {
    throw DeviceError("the NVIDIA driver sees no GPU (" + named(cudaErrorNoDevice) +
                      "): look at nvidia-smi, CUDA_VISIBLE_DEVICES and the container's devices" + kInstead);
  }
  throw DeviceError("the NVIDIA driver does not start (" + named(error) + ")" + kInstead);
}

void check_gpu() {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) {
    throw DeviceError("the GPU does not say what it is (" + named(error) + ")" + kInstead);
  }
  const std::string gpu = "GPU " + std::to_string(device) + ", of compute capability " +
                          std::to_string(major) + "." + std::to_string(minor);
  if (10 * major + minor < 75) {
    throw DeviceError(gpu + ", is too old: ringlm needs 7.5 (Turing) or newer" + kInstead);
  }
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, probe);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion) {
    const std::string arch = std::to_string(10 * major + minor);
    throw DeviceError("libringlm_cuda has no code for " + gpu + " (" + named(error) + "): it was built for " +
                      RINGLM_CUDA_ARCHS + "; build ringlm with RINGLM_CUDA_ARCHS=" + arch + kInstead);
  }
  if (error != cudaSuccess) throw DeviceError(gpu + ", does not work (" + named(error) + ")" + kInstead);
}

std::unique_ptr<Ops> open(const Config& config, const Weights& weights) {
  check_driver();
  check_gpu();
  const char* const graph = std::getenv("RINGLM_CUDA_GRAPH");  // "0": to compare, and for debuggers
  return make_cuda_ops(config, weights, {.graph = graph == nullptr || std::string_view(graph) != "0"});
}

constexpr Library kLibrary{RINGLM_BUILD, RINGLM_CUDA_ARCHS, open};

}  // namespace

}  // namespace ringlm::cuda

const ringlm::cuda::Library* ringlm_cuda_library() { return &ringlm::cuda::kLibrary; }

// simt/simt.h and what tests set of simt/runtime_api.h, on a GPU. Buffers are mapped pinned memory of the
// host, so that tests fill and read them as they do on the host; launches wait until they are done
// (main.cpp), so they may.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "cuda/runtime.h"
#include "gpu/gpu.h"
#include "simt/runtime_api.h"
#include "simt/simt.h"

namespace simt {
namespace {

constexpr unsigned char kNothing = 0xff, kGuard = 0xa5;

// Bytes before and behind a buffer that nothing may write. None for compute-sanitizer, which knows the exact
// sizes of allocations itself and sees reads too.
std::size_t guard_bytes() {
  static const std::size_t bytes = std::getenv("RINGLM_GPU_NO_GUARDS") != nullptr ? 0 : 256;
  return bytes;
}

struct Allocation {
  unsigned char* all;
  std::size_t bytes;  // of the buffer
  std::string name;
};
std::mutex mutex;
std::unordered_map<void*, Allocation> allocations;

}  // namespace

Options& options() {
  static Options all;
  return all;
}

void* device_alloc(std::size_t bytes, std::string name) {
  void* memory = nullptr;
  const std::size_t guard = guard_bytes(), n = bytes + 2 * guard;
  ringlm::cuda::check(cudaHostAlloc(&memory, std::max<std::size_t>(n, 1), cudaHostAllocMapped), name.c_str());
  auto* const all = static_cast<unsigned char*>(memory);
  std::memset(all, kGuard, n);
  std::memset(all + guard, kNothing, bytes);
  const std::lock_guard lock(mutex);
  allocations[all + guard] = {all, bytes, std::move(name)};
  return all + guard;
}

void device_free(void* memory) {
  Allocation gone;
  {
    const std::lock_guard lock(mutex);
    gone = std::move(allocations.at(memory));
    allocations.erase(memory);
  }
  if (cudaDeviceSynchronize() == cudaSuccess) {  // a lost device takes its memory along
    const std::size_t guard = guard_bytes();
    const auto touched = [&](const unsigned char* from) {
      return std::any_of(from, from + guard, [](unsigned char byte) { return byte != kGuard; });
    };
    if (touched(gone.all) || touched(gone.all + guard + gone.bytes)) {
      // A destructor may not throw, and nothing that runs now is of the kernel that did it.
      std::fflush(stdout);
      std::fprintf(stderr, "something was written %s the buffer '%s' of %zu bytes\n",
                   touched(gone.all) ? "before" : "behind", gone.name.c_str(), gone.bytes);
      std::exit(4);
    }
  }
  cudaFreeHost(gone.all);
}

LineCount Report::line(Op op, const std::string& file, int line) const { return {file, line, op}; }
BufferCount Report::buffer(const std::string& name) const {
  throw std::out_of_range("nothing is counted on a GPU, not of " + name);
}
Report report() { return {}; }
void reset_report() {}

// Hardware fails when it does, streams run when they do, and nobody counts what is allocated.
Runtime& runtime() {
  static Runtime all{};
  return all;
}
void fail_call(const std::string&, int, cudaError_t, int) {}
void reset_runtime() {}
Live live() { return {}; }

}  // namespace simt

namespace gpu {
namespace {

std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

__global__ void probe() {}

}  // namespace

std::string missing() {
  int n = 0;
  cudaError_t error = cudaGetDeviceCount(&n);
  if (error == cudaSuccess && n == 0) error = cudaErrorNoDevice;
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, probe);
  if (error == cudaSuccess) return "";
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

std::string description() {
  const ringlm::cuda::DeviceInfo d = ringlm::cuda::device_info();
  return d.name + ", sm_" + std::to_string(10 * d.major + d.minor) + ", " + std::to_string(d.n_sm) +
         " multiprocessors, CUDA " + version(d.runtime_version) + ", driver for CUDA " +
         version(d.driver_version);
}

std::string error(bool& lost) {
  cudaError_t found = cudaDeviceSynchronize();
  const cudaError_t last = cudaGetLastError();
  if (found == cudaSuccess) found = last;
  lost = ringlm::cuda::device_is_lost(found);
  return found == cudaSuccess ? "" : std::string(cudaGetErrorName(found)) + ": " + cudaGetErrorString(found);
}

}  // namespace gpu

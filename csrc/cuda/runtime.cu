#include "cuda/runtime.h"

#include <algorithm>

#include "host/memory.h"
#include "ringlm/error.h"

namespace ringlm::cuda {
namespace {

// "; and what to do about it", or nothing.
const char* advice(cudaError_t error) {
  if (device_is_lost(error)) {
    return error == cudaErrorECCUncorrectable
               ? "; the GPU's memory has failed: open the model in a new process, and where that fails too, "
                 "reset the GPU (nvidia-smi --gpu-reset) or restart the machine"
               : "; this process cannot use the GPU any more: open the model in a new one. If it happens "
                 "again, please report it with the model's name and this message";
  }
  switch (error) {
    case cudaErrorDevicesUnavailable:
      return "; the GPU is held by another process in exclusive mode, or is not available: end that process "
             "(nvidia-smi lists them), let several share the GPU (nvidia-smi -c DEFAULT), or use "
             "device='cpu'";
    case cudaErrorNoDevice:
      return "; no NVIDIA GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'";
    case cudaErrorInvalidDevice:
      return "; there is no GPU of that number: see nvidia-smi -L and CUDA_VISIBLE_DEVICES";
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorUnsupportedPtxVersion:
      return "; the NVIDIA driver is missing or older than this build needs: update the driver (and restart "
             "the machine after that), or use device='cpu'";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return "; this build has no code for the GPU: build it with RINGLM_CUDA_ARCHS set to its "
             "compute capability, or use device='cpu'";
    case cudaErrorSystemNotReady:
    case cudaErrorInitializationError:
    case cudaErrorOperatingSystem:
      return "; the driver does not work: see nvidia-smi, or use device='cpu'";
    default:
      return "";
  }
}

}  // namespace

bool device_is_lost(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

void check(cudaError_t error, const char* operation) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // else the next check_launch() would find it
  const std::string text = std::string("CUDA error ") + cudaGetErrorName(error) + " in " + operation + ": " +
                           cudaGetErrorString(error);
  if (error != cudaErrorMemoryAllocation) throw DeviceError(text + advice(error));
  std::size_t free = 0, total = 0;
  std::string there;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) {
    there = "; " + host::format_bytes(free) + " of " + host::format_bytes(total) + " are free";
  }
  cudaGetLastError();
  throw OutOfMemory(text + there +
                    ": choose a shorter context or a smaller model, or end what else uses the GPU");
}

void check_launch(const char* operation) { check(cudaGetLastError(), operation); }

// ---- the device

int device_count() noexcept {
  int n = 0;
  if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
  cudaGetLastError();
  return 0;
}

void use_device(int index) {
  int n = 0;
  check(cudaGetDeviceCount(&n), "looking for GPUs");
  check(n == 0 ? cudaErrorNoDevice : cudaSuccess, "looking for GPUs");
  check(cudaSetDevice(index), "opening the GPU");
  check(cudaFree(nullptr), "opening the GPU");  // makes the context, where an older driver has not yet
}

void select_device(int index) { check(cudaSetDevice(index), "opening the GPU"); }

DeviceInfo device_info() {
  constexpr const char* operation = "asking about the GPU";
  DeviceInfo info{};
  check(cudaGetDevice(&info.index), operation);
  cudaDeviceProp p;
  check(cudaGetDeviceProperties(&p, info.index), operation);
  info.name = p.name;
  info.major = p.major, info.minor = p.minor;
  info.n_sm = p.multiProcessorCount;
  info.integrated = p.integrated != 0;
  info.total_memory = p.totalGlobalMem;
  info.most_shared = p.sharedMemPerBlockOptin;
  info.l2_bytes = static_cast<std::size_t>(p.l2CacheSize);
  check(cudaDriverGetVersion(&info.driver_version), operation);
  check(cudaRuntimeGetVersion(&info.runtime_version), operation);
  return info;
}

std::size_t free_device_memory() {
  constexpr const char* operation = "asking for free memory";
  int device = 0, integrated = 0;
  check(cudaGetDevice(&device), operation);
  check(cudaDeviceGetAttribute(&integrated, cudaDevAttrIntegrated, device), operation);
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), operation);
  return integrated != 0 ? std::min(total, host::available_memory()) : free;
}

// ---- owners

template <Where kWhere>
Memory<kWhere>::Memory(std::size_t bytes, const char* what) : bytes_(bytes) {
  if (bytes == 0) return;
  check(kWhere == Where::Device ? cudaMalloc(&data_, bytes)
                                : cudaHostAlloc(&data_, bytes, cudaHostAllocDefault),
        what);
}
template <Where kWhere>
Memory<kWhere>::~Memory() {
  if (data_ == nullptr) return;
  kWhere == Where::Device ? cudaFree(data_) : cudaFreeHost(data_);
}
template class Memory<Where::Device>;
template class Memory<Where::Pinned>;

StreamHandle::StreamHandle() {
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}
StreamHandle::~StreamHandle() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}
void StreamHandle::synchronize(const char* operation) const {
  check(cudaStreamSynchronize(stream_), operation);
}

Event::Event(Timing timing) {
  check(cudaEventCreateWithFlags(&event_, timing == Timing::On ? cudaEventDefault : cudaEventDisableTiming),
        "making an event");
}
Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}
void Event::record(Stream stream) { check(cudaEventRecord(event_, stream), "recording an event"); }
void Event::wait(const char* operation) const { check(cudaEventSynchronize(event_), operation); }
float Event::ms_since(const Event& earlier) const {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, earlier.event_, event_), "timing");
  return ms;
}

// Relaxed: other threads may allocate meanwhile, for sessions of their own, and so may this one, in what the
// caller looks for between two layers.
void Graph::begin(Stream stream) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capturing a graph");
}
void Graph::abandon(Stream stream) noexcept {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(stream, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
}
void Graph::end(Stream stream) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(stream, &graph), "capturing a graph");
  const cudaError_t error = cudaGraphInstantiate(&exec_, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "making a graph");
}
Graph::~Graph() {
  if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
}
void Graph::launch(Stream stream) const { check(cudaGraphLaunch(exec_, stream), "launching a graph"); }

}  // namespace ringlm::cuda

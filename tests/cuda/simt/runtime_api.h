// Stand-ins for what the host side of a backend calls of the CUDA runtime API, with the executor as device:
// the same host code, compiled by g++, allocates, copies, captures and launches here.
//
// Stricter than CUDA, so that mistakes show:
//   - A copy that leaves a buffer, goes to freed memory or takes device memory for the host's throws Fault.
//     So does a handle (stream, event, graph) that was destroyed.
//   - Device memory has its exact size; memory from cudaHostAlloc too, and kernels may read it.
//   - While a stream captures: copies of pageable memory, allocations, synchronization and anything on the
//     null stream are errors.
// Streams run what they are given at once; with runtime().late they run it when somebody waits for it, or
// when CUDA would let them: host code that reuses a pinned buffer too early then copies the wrong bytes.
//
// A Fault of a kernel leaves the call in which it ran (launch, synchronization, cudaGraphLaunch) as an
// exception. Not here: a second device, contexts, priorities, memory pools, callbacks, graph nodes by hand.
#pragma once

#include <cstddef>
#include <string>

#include "simt/simt.h"

#if !defined(__CUDACC__)

// ---- names and numbers of CUDA 12 and 13

// X(name, number, text)
#define SIMT_CUDA_ERRORS(X)                                                                                 \
  X(cudaSuccess, 0, "no error")                                                                             \
  X(cudaErrorInvalidValue, 1, "invalid argument")                                                           \
  X(cudaErrorMemoryAllocation, 2, "out of memory")                                                          \
  X(cudaErrorInitializationError, 3, "initialization error")                                                \
  X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                     \
  X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                               \
  X(cudaErrorStubLibrary, 34, "CUDA driver is a stub library")                                              \
  X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime")                \
  X(cudaErrorDevicesUnavailable, 46, "CUDA-capable device(s) is/are busy or unavailable")                   \
  X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                          \
  X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                           \
  X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                                  \
  X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution")                     \
  X(cudaErrorECCUncorrectable, 214, "uncorrectable ECC error encountered")                                  \
  X(cudaErrorUnsupportedPtxVersion, 222, "the PTX was compiled with an unsupported toolchain")              \
  X(cudaErrorOperatingSystem, 304, "OS call failed or operation not supported on this OS")                  \
  X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                         \
  X(cudaErrorNotReady, 600, "device not ready")                                                             \
  X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                               \
  X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")                          \
  X(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                                 \
  X(cudaErrorAssert, 710, "device-side assert triggered")                                                   \
  X(cudaErrorHardwareStackError, 714, "hardware stack error")                                               \
  X(cudaErrorIllegalInstruction, 715, "an illegal instruction was encountered")                             \
  X(cudaErrorMisalignedAddress, 716, "misaligned address")                                                  \
  X(cudaErrorInvalidAddressSpace, 717, "operation not supported on this address space")                     \
  X(cudaErrorInvalidPc, 718, "invalid program counter")                                                     \
  X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                              \
  X(cudaErrorNotPermitted, 800, "operation not permitted")                                                  \
  X(cudaErrorNotSupported, 801, "operation not supported")                                                  \
  X(cudaErrorSystemNotReady, 802, "system not yet initialized")                                             \
  X(cudaErrorSystemDriverMismatch, 803, "driver and kernel module versions do not match")                   \
  X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")             \
  X(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")      \
  X(cudaErrorStreamCaptureImplicit, 906, "dependency on an uncaptured stream of the legacy default stream") \
  X(cudaErrorUnknown, 999, "unknown error")

enum cudaError_t {
#define SIMT_ENUMERATE(name, number, text) name = number,
  SIMT_CUDA_ERRORS(SIMT_ENUMERATE)
#undef SIMT_ENUMERATE
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrIntegrated = 18,
  cudaDevAttrCanMapHostMemory = 19,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};

constexpr int CUDART_VERSION = 12060;

struct cudaFuncAttributes {
  int numRegs, maxThreadsPerBlock;
};

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};

enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};

constexpr unsigned cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
constexpr unsigned cudaStreamDefault = 0, cudaStreamNonBlocking = 1;
constexpr unsigned cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2;

struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin, sharedMemPerMultiprocessor;
  int major, minor, multiProcessorCount, warpSize, maxThreadsPerBlock, regsPerMultiprocessor;
  int integrated, canMapHostMemory, memoryBusWidth, l2CacheSize;
};

namespace simt {
struct EventState;
struct GraphState;
struct GraphExecState;
}  // namespace simt
using cudaStream_t = simt::Stream;
using cudaEvent_t = simt::EventState*;
using cudaGraph_t = simt::GraphState*;
using cudaGraphExec_t = simt::GraphExecState*;

// ---- the API

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);

cudaError_t cudaMalloc(void** memory, std::size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags);
template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
template <class T>
cudaError_t cudaHostAlloc(T** memory, std::size_t bytes, unsigned flags) {
  return cudaHostAlloc(reinterpret_cast<void**>(memory), bytes, flags);
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream = nullptr);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);

namespace simt {
cudaError_t set_function_attribute(const void* function, cudaFuncAttribute attribute, int value);
}
template <class T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T*) {
  *attributes = {64, 1024};  // every kernel is there
  return cudaSuccess;
}
template <class T>
cudaError_t cudaFuncSetAttribute(T* function, cudaFuncAttribute attribute, int value) {
  return simt::set_function_attribute(reinterpret_cast<const void*>(function), attribute, value);
}

#endif

// ---- what tests set

namespace simt {

struct Runtime {
  int devices = 1;
  bool late = false;             // streams run what they are given when somebody waits for it
  std::size_t others_bytes = 0;  // of device memory that other processes have
  cudaDeviceProp properties;     // of a T4, with 1 GiB
  int driver_version = 12060, runtime_version = 12060;
};
Runtime& runtime();

// Call number `nth` of a function ("cudaMalloc"; a launch is "cudaLaunchKernel"), counted from now, the next
// one being 1, does nothing but return the error; `times` calls from there on. An error after which CUDA
// takes no more calls from a process (cudaErrorECCUncorrectable, cudaErrorIllegalAddress ...) is what every
// later call returns, until reset_runtime().
void fail_call(const std::string& function, int nth, cudaError_t error, int times = 1);

// runtime() as it was at the start, nothing that fails, no error to get. Handles and memory stay.
void reset_runtime();

// What cudaMalloc and cudaHostAlloc gave and nobody has freed, and streams, events and graphs.
struct Live {
  std::size_t device_buffers = 0, device_bytes = 0, pinned_buffers = 0, pinned_bytes = 0, handles = 0;
};
Live live();

}  // namespace simt

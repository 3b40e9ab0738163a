// The stand-ins for the CUDA runtime API: what they do, and what they refuse.
#include "simt/runtime_api.h"

#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/port.h"
#include "simt/helpers.h"

using namespace simt;

namespace {

struct Fresh {
  Live before = live();
  Fresh() { reset_runtime(); }
  ~Fresh() {
    reset_runtime();
    const Live after = live();
    CHECK(after.device_bytes == before.device_bytes);
    CHECK(after.pinned_buffers == before.pinned_buffers);
    CHECK(after.handles == before.handles);
  }
};

namespace kernels {
__global__ void add(int* to, const int* from, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < n)
    ringlm::cuda::st_global(to + i, ringlm::cuda::ld_global(to + i) + ringlm::cuda::ld_global(from + i));
}
__global__ void use_shared(int* to) {
  SMEM_DYN(int, scratch);
  scratch[threadIdx.x] = 5;
  ringlm::cuda::st_global(to + threadIdx.x, scratch[threadIdx.x]);
}
}  // namespace kernels

// n ints of the device, of the host, and a stream.
struct Parts {
  int *x = nullptr, *y = nullptr, *host = nullptr;
  cudaStream_t stream = nullptr;
  explicit Parts(std::size_t n) {
    REQUIRE(cudaMalloc(&x, n * sizeof(int)) == cudaSuccess);
    REQUIRE(cudaMalloc(&y, n * sizeof(int)) == cudaSuccess);
    REQUIRE(cudaHostAlloc(&host, n * sizeof(int), cudaHostAllocDefault) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    std::iota(host, host + n, 1);
  }
  ~Parts() {
    cudaFree(x);
    cudaFree(y);
    cudaFreeHost(host);
    cudaStreamDestroy(stream);
  }
};

template <class F>
std::string fault_of(F f) {
  try {
    f();
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "no fault";
}

}  // namespace

TEST_CASE("copies, sets and launches of a stream, at once and late") {
  for (const bool late : {false, true}) {
    const Fresh fresh;
    runtime().late = late;
    Parts p(8);
    CHECK(cudaMemcpyAsync(p.x, p.host, 32, cudaMemcpyHostToDevice, p.stream) == cudaSuccess);
    CHECK(cudaMemsetAsync(p.y, 0, 32, p.stream) == cudaSuccess);
    LAUNCH(kernels::add, 1, 8, 0, p.stream, p.y, p.x, 8);
    LAUNCH(kernels::add, 1, 8, 0, p.stream, p.y, p.x, 8);
    CHECK((p.y[7] == 16) == !late);
    CHECK(cudaStreamQuery(p.stream) == (late ? cudaErrorNotReady : cudaSuccess));
    CHECK(cudaStreamSynchronize(p.stream) == cudaSuccess);
    CHECK(p.y[7] == 16);
    std::vector<int> pageable(8);
    LAUNCH(kernels::add, 1, 8, 0, p.stream, p.y, p.x, 8);
    CHECK(cudaMemcpyAsync(pageable.data(), p.y, 32, cudaMemcpyDeviceToHost, p.stream) == cudaSuccess);
    CHECK(pageable[7] == 24);  // the copy waits
  }
}

TEST_CASE("a pinned buffer that is written again too early is copied as it then is") {
  const Fresh fresh;
  runtime().late = true;
  Parts p(4);
  cudaEvent_t copied;
  REQUIRE(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming) == cudaSuccess);
  cudaMemcpyAsync(p.x, p.host, 16, cudaMemcpyHostToDevice, p.stream);
  p.host[0] = 70;
  cudaStreamSynchronize(p.stream);
  CHECK(p.x[0] == 70);
  cudaMemcpyAsync(p.x, p.host, 16, cudaMemcpyHostToDevice, p.stream);
  CHECK(cudaEventRecord(copied, p.stream) == cudaSuccess);
  CHECK(cudaEventQuery(copied) == cudaErrorNotReady);
  CHECK(cudaEventSynchronize(copied) == cudaSuccess);
  p.host[0] = 71;
  CHECK(p.x[0] == 70);
  cudaMemcpyAsync(p.y, p.host, 16, cudaMemcpyHostToDevice, p.stream);
  cudaEventRecord(copied, p.stream);
  cudaStream_t other;
  REQUIRE(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(other, copied) == cudaSuccess);
  LAUNCH(kernels::add, 1, 4, 0, other, p.x, p.y, 4);
  CHECK(cudaStreamSynchronize(other) == cudaSuccess);
  CHECK(p.x[0] == 141);
  cudaStreamDestroy(other);
  cudaEventDestroy(copied);
}

TEST_CASE("time between events") {
  const Fresh fresh;
  cudaEvent_t a, b, untimed;
  cudaEventCreateWithFlags(&a, cudaEventDefault);
  cudaEventCreateWithFlags(&b, cudaEventDefault);
  cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming);
  float ms = -1;
  CHECK(cudaEventElapsedTime(&ms, a, b) == cudaErrorInvalidResourceHandle);  // never recorded
  cudaEventRecord(a);
  cudaEventRecord(b);
  cudaEventRecord(untimed);
  CHECK(cudaEventElapsedTime(&ms, a, b) == cudaSuccess);
  CHECK(ms >= 0);
  CHECK(cudaEventElapsedTime(&ms, a, untimed) == cudaErrorInvalidResourceHandle);
  for (const cudaEvent_t e : {a, b, untimed}) cudaEventDestroy(e);
}

TEST_CASE("a graph holds what its stream was given, with arguments as they were, and memory as it is") {
  for (const bool late : {false, true}) {
    const Fresh fresh;
    runtime().late = late;
    Parts p(4);
    int n = 4;
    REQUIRE(cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    cudaMemcpyAsync(p.x, p.host, 16, cudaMemcpyHostToDevice, p.stream);
    cudaMemsetAsync(p.y, 0, 8, p.stream);  // the first two
    LAUNCH(kernels::add, 1, 4, 0, p.stream, p.y, p.x, n);
    n = 0;
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(p.stream, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusActive);
    cudaGraph_t graph;
    REQUIRE(cudaStreamEndCapture(p.stream, &graph) == cudaSuccess);
    cudaGraphExec_t exec;
    REQUIRE(cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    std::fill(p.y, p.y + 4, 100);
    for (const int first : {10, 20}) {
      p.host[0] = p.host[3] = first;
      CHECK(cudaGraphLaunch(exec, p.stream) == cudaSuccess);
      cudaStreamSynchronize(p.stream);
    }
    CHECK(std::vector<int>(p.y, p.y + 4) == std::vector<int>{20, 2, 106, 130});
    CHECK(cudaGraphExecDestroy(exec) == cudaSuccess);
    CHECK(fault_of([&] { cudaGraphLaunch(exec, p.stream); }).find("destroyed") != std::string::npos);
  }
}

TEST_CASE("a fault in a graph leaves its launch") {
  const Fresh fresh;
  Parts p(4);
  cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeThreadLocal);
  LAUNCH(kernels::add, 1, 4, 0, p.stream, p.y, p.x, 4);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStreamEndCapture(p.stream, &graph);
  cudaGraphInstantiate(&exec, graph, 0);
  CHECK(cudaFree(p.x) == cudaSuccess);
  p.x = nullptr;
#if !defined(__SANITIZE_ADDRESS__)
  CHECK(fault_of([&] { cudaGraphLaunch(exec, p.stream); }).find("out of bounds: global load") !=
        std::string::npos);
#endif
  cudaGraphDestroy(graph);
  cudaGraphExecDestroy(exec);
}

TEST_CASE("what a capture cannot hold ends it") {
  const Fresh fresh;
  Parts p(4);
  std::vector<int> pageable(4);
  void* memory = nullptr;
  cudaGraph_t graph;
  const auto lost = [&](cudaError_t error, cudaError_t expected) {
    CHECK(error == expected);
    CHECK(cudaMemsetAsync(p.x, 0, 16, p.stream) == cudaErrorStreamCaptureInvalidated);
    CHECK(cudaStreamEndCapture(p.stream, &graph) == cudaErrorStreamCaptureInvalidated);
    CHECK(graph == nullptr);
    CHECK(cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  };
  cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeThreadLocal);
  lost(cudaStreamSynchronize(p.stream), cudaErrorStreamCaptureUnsupported);
  lost(cudaMalloc(&memory, 4), cudaErrorStreamCaptureUnsupported);
  lost(cudaMemcpyAsync(p.x, pageable.data(), 16, cudaMemcpyHostToDevice, p.stream),
       cudaErrorStreamCaptureUnsupported);
  lost(cudaMemsetAsync(p.x, 0, 16), cudaErrorStreamCaptureImplicit);
  cudaStreamEndCapture(p.stream, &graph);
  cudaGraphDestroy(graph);
  CHECK(cudaStreamEndCapture(p.stream, &graph) == cudaErrorInvalidValue);
}

TEST_CASE("copies stay in their buffers") {
  const Fresh fresh;
  Parts p(4);
  std::vector<int> other(8);
  const auto copy = [&](void* to, const void* from, std::size_t n, cudaMemcpyKind kind) {
    return fault_of([&] { cudaMemcpyAsync(to, from, n, kind, p.stream); });
  };
  CHECK(copy(p.x, p.host, 16, cudaMemcpyHostToDevice) == "no fault");
  CHECK(
      copy(p.x + 1, p.host, 16, cudaMemcpyHostToDevice).find("of 16 bytes to byte 4 of buffer cudaMalloc") !=
      std::string::npos);
  CHECK(copy(p.x, p.host, 17, cudaMemcpyDefault).find("from byte 0 of buffer cudaHostAlloc") !=
        std::string::npos);
  CHECK(copy(p.x - 1, p.host, 4, cudaMemcpyHostToDevice).find("to byte -4 of") != std::string::npos);
  CHECK(copy(p.x, p.y, 16, cudaMemcpyHostToDevice).find("said to be the host's") != std::string::npos);
  CHECK(copy(other.data(), p.host, 16, cudaMemcpyHostToDevice).find("not, or no longer, on the device") !=
        std::string::npos);
  CHECK(fault_of([&] {
          cudaMemsetAsync(p.x + 3, 0, 5, p.stream);
        }).find("cudaMemsetAsync of 5 bytes at byte 12") != std::string::npos);
  int* const freed = p.y;
  cudaFree(p.y);
  p.y = nullptr;
  CHECK(copy(freed, p.host, 16, cudaMemcpyHostToDevice).find("no longer") != std::string::npos);
  CHECK(cudaFree(freed) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("memory ends where the test says") {
  const Fresh fresh;
  std::size_t free = 0, total = 0;
  runtime().properties.totalGlobalMem = 1000 + live().device_bytes;
  runtime().others_bytes = 300;
  void *a = nullptr, *b = nullptr;
  CHECK(cudaMalloc(&a, 500) == cudaSuccess);
  CHECK(cudaMalloc(&b, 201) == cudaErrorMemoryAllocation);
  CHECK(b == nullptr);
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(free == 200);
  CHECK(cudaPeekAtLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaFree(a) == cudaSuccess);
  CHECK(cudaFree(nullptr) == cudaSuccess);
}

TEST_CASE("calls fail when the test says, and after some errors for ever") {
  const Fresh fresh;
  Parts p(4);
  fail_call("cudaMemsetAsync", 2, cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(p.x, 0, 16, p.stream) == cudaSuccess);
  CHECK(cudaMemsetAsync(p.x, 1, 16, p.stream) == cudaErrorInvalidValue);
  CHECK(p.x[0] == 0);
  CHECK(cudaMemsetAsync(p.x, 0, 16, p.stream) == cudaSuccess);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);

  fail_call("cudaLaunchKernel", 1, cudaErrorLaunchOutOfResources);
  LAUNCH(kernels::add, 1, 4, 0, p.stream, p.y, p.x, 4);
  CHECK(cudaGetLastError() == cudaErrorLaunchOutOfResources);
  CHECK(cudaGetLastError() == cudaSuccess);

  fail_call("cudaStreamSynchronize", 1, cudaErrorECCUncorrectable);
  CHECK(cudaStreamSynchronize(p.stream) == cudaErrorECCUncorrectable);
  CHECK(cudaMemsetAsync(p.x, 0, 16, p.stream) == cudaErrorECCUncorrectable);
  CHECK(cudaGetLastError() == cudaErrorECCUncorrectable);
  CHECK(cudaGetLastError() == cudaErrorECCUncorrectable);
  CHECK(std::string(cudaGetErrorName(cudaGetLastError())) == "cudaErrorECCUncorrectable");
  CHECK(std::string(cudaGetErrorString(cudaErrorNoDevice)) == "no CUDA-capable device is detected");
}

TEST_CASE("devices") {
  const Fresh fresh;
  int n = -1, value = 0;
  CHECK(cudaGetDeviceCount(&n) == cudaSuccess);
  CHECK(n == 1);
  CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
  runtime().properties.integrated = 1;
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrIntegrated, 0) == cudaSuccess);
  CHECK(value == 1);
  runtime().devices = 0;
  CHECK(cudaGetDeviceCount(&n) == cudaErrorNoDevice);
  CHECK(n == 0);
}

TEST_CASE("a kernel gets more shared memory where it opts in") {
  const Fresh fresh;
  Buffer<int> y("y", 32);
  const auto launch = [&] { LAUNCH(kernels::use_shared, 1, 32, 60 << 10, nullptr, y.data()); };
  CHECK(fault_of(launch).find("61440 bytes of shared memory, the limit is 49152") != std::string::npos);
  const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
  CHECK(cudaFuncSetAttribute(kernels::use_shared, most, 65 << 10) == cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(kernels::use_shared, most, 60 << 10) == cudaSuccess);
  CHECK(fault_of(launch) == "no fault");
}

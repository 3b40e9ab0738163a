// Errors of the CUDA runtime as ringlm says them, and the owners of its handles.
#include "cuda/runtime.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "cuda/port.h"
#include "fresh.h"
#include "host/memory.h"
#include "ringlm/error.h"

using namespace ringlm;
using namespace ringlm::cuda;

namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

__global__ void add_one(int* x, int n) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < n) st_global(x + i, ld_global(x + i) + 1);
}

}  // namespace

TEST_CASE("errors say what failed and what to do") {
  const Fresh fresh;
  CHECK_NOTHROW(check(cudaSuccess, "gemv"));
  const auto device_error = [](cudaError_t error) {
    return message_of<DeviceError>([&] { check(error, "gemv"); });
  };
  CHECK(device_error(cudaErrorInvalidValue) == "CUDA error cudaErrorInvalidValue in gemv: invalid argument");
  CHECK(has(device_error(cudaErrorDevicesUnavailable), "nvidia-smi -c DEFAULT"));
  CHECK(has(device_error(cudaErrorECCUncorrectable), "--gpu-reset"));
  CHECK(has(device_error(cudaErrorIllegalAddress), "open the model in a new one"));
  CHECK(has(device_error(cudaErrorNoDevice), "device='cpu'"));
  CHECK(has(device_error(cudaErrorInsufficientDriver), "update the driver"));
  CHECK(has(device_error(cudaErrorNoKernelImageForDevice), "RINGLM_CUDA_ARCHS"));
  const std::string memory =
      message_of<OutOfMemory>([] { DeviceMemory(std::size_t{2} << 30, "allocating keys and values"); });
  CHECK(has(memory, "cudaErrorMemoryAllocation in allocating keys and values: out of memory; "));
  CHECK(has(memory, "of 1.00 GiB are free"));
  CHECK_NOTHROW(check_launch("the next"));  // the error was of the call before
}

TEST_CASE("a launch that is refused") {
  const Fresh fresh;
  DeviceMemory x(64, "x");
  simt::fail_call("cudaLaunchKernel", 1, cudaErrorLaunchOutOfResources);
  LAUNCH(add_one, 1, 16, 0, nullptr, x.as<int>(), 16);
  CHECK(has(message_of<DeviceError>([] { check_launch("add_one"); }), "LaunchOutOfResources in add_one"));
  CHECK_NOTHROW(check_launch("add_one"));
}

TEST_CASE("owners move, and survive a device that is gone") {
  const Fresh fresh;
  {
    DeviceMemory a(100, "a"), b(200, "b");
    std::uint8_t* const data = a.data();
    b = std::move(a);
    CHECK(b.data() == data);
    CHECK(b.span().size() == 100);
    const DeviceMemory c(std::move(b)), none(0, "none");
    CHECK(b.data() == nullptr);
    CHECK(none.data() == nullptr);
    PinnedMemory pinned(64, "p");
    const PinnedMemory moved(std::move(pinned));
    StreamHandle stream;
    Event first(Event::Timing::On), second(Event::Timing::On);
    first.record(stream.get());
    second.record(stream.get());
    second.wait("timing");
    CHECK(second.ms_since(first) >= 0);
    simt::fail_call("cudaMemsetAsync", 1, cudaErrorECCUncorrectable);
    CHECK_THROWS_AS(check(cudaMemsetAsync(c.data(), 0, 100, stream.get()), "clearing"), DeviceError);
    CHECK_THROWS_AS(stream.synchronize("waiting"), DeviceError);
  }
}

TEST_CASE("graphs") {
  const Fresh fresh;
  for (const bool late : {false, true}) {
    simt::runtime().late = late;
    StreamHandle stream;
    DeviceMemory x(64, "x");
    std::fill_n(x.as<int>(), 16, 5);
    Graph graph(stream.get(), [&] {
      for (int i = 0; i < 3; ++i) LAUNCH(add_one, 1, 16, 0, stream.get(), x.as<int>(), 16);
      check_launch("add_one");
    });
    CHECK(x.as<int>()[15] == 5);
    for (int i = 0; i < 2; ++i) graph.launch(stream.get());
    stream.synchronize("the graph");
    CHECK(x.as<int>()[15] == 11);

    // What throws while it is captured leaves the stream as it was.
    CHECK_THROWS_AS(Graph(stream.get(), [] { throw NumericError("while capturing"); }), NumericError);
    CHECK_THROWS_AS(Graph(stream.get(), [&] { stream.synchronize("in a capture"); }), DeviceError);
    simt::fail_call("cudaGraphInstantiate", 1, cudaErrorMemoryAllocation);
    CHECK_THROWS_AS(Graph(stream.get(), [] {}), OutOfMemory);
    simt::fail_call("cudaGraphLaunch", 1, cudaErrorLaunchFailure);
    CHECK_THROWS_AS(graph.launch(stream.get()), DeviceError);
    simt::reset_runtime();
  }
}

TEST_CASE("the device") {
  const Fresh fresh;
  CHECK(device_count() == 1);
  CHECK_NOTHROW(use_device(0));
  CHECK(has(message_of<DeviceError>([] { use_device(1); }), "nvidia-smi -L"));
  const DeviceInfo info = device_info();
  CHECK(info.name == "SIMT executor");
  CHECK(info.major == 7);
  CHECK(info.most_shared == 64 << 10);
  simt::runtime().others_bytes = std::size_t{1} << 29;
  CHECK(free_device_memory() <= std::size_t{1} << 29);
  simt::runtime().properties.integrated = 1;  // then the host knows
  CHECK(free_device_memory() == std::min(info.total_memory, host::available_memory()));
  simt::runtime().devices = 0;
  CHECK(device_count() == 0);
  CHECK(has(message_of<DeviceError>([] { use_device(0); }), "no NVIDIA GPU"));
  simt::runtime().devices = 1;
  simt::fail_call("cudaFree", 1, cudaErrorDevicesUnavailable);
  CHECK(has(message_of<DeviceError>([] { use_device(0); }), "exclusive mode"));
}

#include "simt/runtime_state.h"

#include <cstdio>
#include <exception>

#include "simt/machine.h"

namespace simt {

namespace {

bool loses_device(cudaError_t error) {
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
      return true;
    default:
      return false;
  }
}

}  // namespace

Runtime first_runtime() {
  Runtime r{};
  cudaDeviceProp& p = r.properties;
  std::snprintf(p.name, sizeof p.name, "SIMT executor");
  p.totalGlobalMem = std::size_t{1} << 30;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = p.sharedMemPerMultiprocessor = 64 << 10;
  p.major = 7, p.minor = 5;
  p.multiProcessorCount = 40;
  p.warpSize = 32;
  p.maxThreadsPerBlock = 1024;
  p.regsPerMultiprocessor = 64 << 10;
  p.canMapHostMemory = 1;
  p.memoryBusWidth = 256;
  p.l2CacheSize = 4 << 20;
  return r;
}

Api& api() {
  machine();  // outlives it
  static Api the_api;
  return the_api;
}

cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) api().last = error;
  if (loses_device(error)) api().lost = error;
  return error;
}

cudaError_t failure_of(const char* function) {
  Api& s = api();
  cudaError_t error = cudaSuccess;
  const auto [begin, end] = s.failures.equal_range(function);
  for (auto it = begin; it != end;) {
    Failure& f = it->second;
    if (--f.nth > 0) {
      ++it;
      continue;
    }
    error = f.error;
    it = --f.times > 0 ? std::next(it) : s.failures.erase(it);
  }
  return s.lost != cudaSuccess ? s.lost : error;
}

cudaError_t enter(const char* function) {
  if (const cudaError_t error = failure_of(function)) return returned(error);
  if (api().runtime.devices == 0) return returned(cudaErrorNoDevice);
  return cudaSuccess;
}

bool forbidden_by_capture() {
  bool any = false;
  for (const auto& stream : api().streams.all()) {
    if (!capturing(*stream)) continue;
    stream->invalidated = any = true;
  }
  return any;
}

void run_next(StreamState& s) {
  const Work work = std::move(s.waiting.front());
  s.waiting.pop_front();
  work();
}

// While an exception is on its way, what is left of the work is not worth another.
void drain(StreamState& s) {
  if (std::uncaught_exceptions() > 0) s.waiting.clear();
  while (!s.waiting.empty()) run_next(s);
}

void drain_all() {
  for (const auto& stream : api().streams.all()) drain(*stream);
}

cudaError_t give(Stream stream, const char* function, Work work, bool now) {
  if (stream == nullptr) {
    if (forbidden_by_capture()) return returned(cudaErrorStreamCaptureImplicit);
    work();
    return cudaSuccess;
  }
  StreamState& s = api().streams.get(stream, function);
  if (capturing(s)) {
    if (now) s.invalidated = true;
    if (s.invalidated) {
      return returned(now ? cudaErrorStreamCaptureUnsupported : cudaErrorStreamCaptureInvalidated);
    }
    s.nodes->push_back(std::move(work));
  } else {
    s.waiting.push_back(std::move(work));
    if (now || !api().runtime.late) drain(s);
  }
  return cudaSuccess;
}

void wait_for(EventState& event) {
  StreamState* const stream = api().streams.get_if(event.stream);
  if (stream != nullptr && std::uncaught_exceptions() > 0) stream->waiting.clear();
  while (!event.done && stream != nullptr && !stream->waiting.empty()) run_next(*stream);
}

Runtime& runtime() { return api().runtime; }

void fail_call(const std::string& function, int nth, cudaError_t error, int times) {
  api().failures.emplace(function, Failure{nth, times, error});
}

void reset_runtime() {
  Api& s = api();
  s.runtime = first_runtime();
  s.failures.clear();
  s.last = s.lost = cudaSuccess;
  for (const auto& stream : s.streams.all()) {
    stream->waiting.clear();
    stream->nodes.reset();
    stream->invalidated = false;
  }
}

Live live() {
  const Api& s = api();
  Live l;
  l.device_buffers = s.device_memory.size();
  l.device_bytes = s.device_bytes;
  l.pinned_buffers = s.pinned.size();
  for (const auto& [memory, bytes] : s.pinned) l.pinned_bytes += bytes;
  l.handles = s.streams.all().size() + s.events.all().size() + s.graphs.all().size() + s.execs.all().size();
  return l;
}

void submit(Launch launch, Stream stream) {
  if (enter("cudaLaunchKernel") != cudaSuccess) return;  // cudaGetLastError has it
  const auto limit = api().shared_limits.find(launch.function);
  if (limit != api().shared_limits.end()) launch.shared_limit = limit->second;
  give(stream, "a launch", [launch = std::move(launch)] { run(launch); });
}

cudaError_t set_function_attribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (const cudaError_t error = enter("cudaFuncSetAttribute")) return error;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  const auto most = api().runtime.properties.sharedMemPerBlockOptin;
  if (value < 0 || static_cast<std::size_t>(value) > most) return returned(cudaErrorInvalidValue);
  api().shared_limits[function] = static_cast<std::size_t>(value);
  return cudaSuccess;
}

}  // namespace simt

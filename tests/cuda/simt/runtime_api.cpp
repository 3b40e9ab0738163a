#include "simt/runtime_api.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simt/machine.h"

namespace simt {

using Work = std::function<void()>;
using Nodes = std::vector<Work>;

struct StreamState {
  std::deque<Work> waiting;      // runtime().late
  std::unique_ptr<Nodes> nodes;  // while it captures
  bool invalidated = false;      // the capture met something that no graph can hold
};
struct EventState {
  bool timed;
  Stream stream = nullptr;  // of the last record
  int records = 0;
  bool done = true;
  std::chrono::steady_clock::time_point time{};
};
struct GraphState {
  Nodes nodes;
};
struct GraphExecState {
  std::shared_ptr<const Nodes> nodes;
};

namespace {

template <class T>
class Handles {
 public:
  T* add(T value) {
    all_.push_back(std::make_unique<T>(std::move(value)));
    return all_.back().get();
  }
  T* get_if(T* handle) {
    const auto at = place(handle);
    return at == all_.end() ? nullptr : at->get();
  }
  T& get(T* handle, const char* function) {
    if (T* const found = get_if(handle)) return *found;
    throw Fault(std::string(function) + " with a handle that is null or was destroyed", "", "", 0, {}, {});
  }
  void remove(T* handle) { all_.erase(place(handle)); }
  const std::vector<std::unique_ptr<T>>& all() const { return all_; }

 private:
  typename std::vector<std::unique_ptr<T>>::iterator place(T* handle) {
    return std::find_if(all_.begin(), all_.end(), [&](const auto& p) { return p.get() == handle; });
  }
  std::vector<std::unique_ptr<T>> all_;
};

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

struct Failure {
  int nth, times;  // calls until it begins, and while it lasts
  cudaError_t error;
};

struct Api {
  Runtime runtime = first_runtime();
  std::multimap<std::string, Failure> failures;
  cudaError_t last = cudaSuccess, lost = cudaSuccess;
  int device = 0, n_allocations = 0;
  std::map<void*, std::size_t> device_memory, pinned;
  std::size_t device_bytes = 0;
  Handles<StreamState> streams;
  Handles<EventState> events;
  Handles<GraphState> graphs;
  Handles<GraphExecState> execs;
  std::unordered_map<const void*, std::size_t> shared_limits;  // by function
};
Api& api() {
  machine();  // outlives it
  static Api the_api;
  return the_api;
}

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

cudaError_t returned(cudaError_t error) {
  if (error != cudaSuccess) api().last = error;
  if (loses_device(error)) api().lost = error;
  return error;
}

// What a test wants of this call, or the error that lost the device.
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

// The start of every call that needs a device.
cudaError_t enter(const char* function) {
  if (const cudaError_t error = failure_of(function)) return returned(error);
  if (api().runtime.devices == 0) return returned(cudaErrorNoDevice);
  return cudaSuccess;
}

bool capturing(const StreamState& s) { return s.nodes != nullptr; }

// Where a capture forbids a call, the capture is lost as well.
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

// Work of a stream, in its order. `now`: the call returns when it is done.
cudaError_t give(Stream stream, const char* function, Work work, bool now = false) {
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

// ---- ranges of memory

[[noreturn]] void refuse(const char* function, const std::string& why) {
  throw Fault(std::string(function) + why, "", "", 0, {}, {});
}

// What cudaMalloc, cudaHostAlloc or a Buffer gave and has the address, or null; all the bytes must be in it.
const Allocation* range(const char* function, const char* direction, const void* memory, std::size_t bytes) {
  const Allocation* a = machine().global.find(memory);
  if (a == nullptr) return nullptr;
  const auto offset = static_cast<const std::byte*>(memory) - a->base;
  if (offset >= 0 && static_cast<std::size_t>(offset) <= a->bytes &&
      bytes <= a->bytes - static_cast<std::size_t>(offset)) {
    return a;
  }
  refuse(function, " of " + std::to_string(bytes) + " bytes " + direction + " " + name_of(memory).c_str());
}

bool is_pinned(const Allocation* a) { return a != nullptr && api().pinned.count(a->base) > 0; }

void need(const char* function, const char* direction, const Allocation* a, bool on_device) {
  if (on_device && a == nullptr) {
    refuse(function, std::string(" ") + direction + " memory that is not, or no longer, on the device");
  }
  if (!on_device && a != nullptr && !is_pinned(a)) {
    refuse(function, std::string(" ") + direction + " buffer " + a->name + ", said to be the host's memory");
  }
}

cudaError_t copy(const char* function, void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 Stream stream, bool now) {
  if (const cudaError_t error = enter(function)) return error;
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return returned(cudaErrorInvalidMemcpyDirection);
  }
  if (bytes == 0) return cudaSuccess;
  if (to == nullptr || from == nullptr) return returned(cudaErrorInvalidValue);
  const auto check = [=] {
    const Allocation *source = range(function, "from", from, bytes),
                     *target = range(function, "to", to, bytes);
    if (kind != cudaMemcpyDefault) {
      need(function, "from", source, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
      need(function, "to", target, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
    }
    return source == nullptr || target == nullptr;  // pageable memory has part in it
  };
  const bool pageable = check();
  return give(
      stream, function,
      [=] {
        check();  // it may be freed by now
        std::memmove(to, from, bytes);
      },
      now || pageable);
}

cudaError_t set(const char* function, void* memory, int value, std::size_t bytes, Stream stream) {
  if (const cudaError_t error = enter(function)) return error;
  if (bytes == 0) return cudaSuccess;
  const auto check = [=] { need(function, "of", range(function, "at", memory, bytes), true); };
  check();
  return give(stream, function, [=] {
    check();
    std::memset(memory, value, bytes);
  });
}

cudaError_t allocate(const char* function, void** memory, std::size_t bytes, bool on_device) {
  if (const cudaError_t error = enter(function)) return error;
  if (forbidden_by_capture()) return returned(cudaErrorStreamCaptureUnsupported);
  Api& s = api();
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  std::size_t free = 0, total = 0;
  if (on_device) {
    cudaMemGetInfo(&free, &total);
    if (bytes > free) return returned(cudaErrorMemoryAllocation);
  }
  *memory = device_alloc(bytes, std::string(function) + " " + std::to_string(++s.n_allocations));
  (on_device ? s.device_memory : s.pinned).emplace(*memory, bytes);
  if (on_device) s.device_bytes += bytes;
  return cudaSuccess;
}

cudaError_t release(const char* function, void* memory, bool on_device) {
  Api& s = api();
  const cudaError_t error = enter(function);
  if (error == cudaSuccess && memory != nullptr && forbidden_by_capture()) {
    return returned(cudaErrorStreamCaptureUnsupported);
  }
  if (memory == nullptr) return error;
  auto& all = on_device ? s.device_memory : s.pinned;
  const auto found = all.find(memory);
  if (found == all.end()) return returned(cudaErrorInvalidValue);
  if (s.lost == cudaSuccess) drain_all();  // as cudaFree does
  if (on_device) s.device_bytes -= found->second;
  device_free(memory);
  all.erase(found);
  return error;  // memory is gone with the device, too
}

}  // namespace

// ---- what tests set

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

// ---- the API

using namespace simt;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
#define SIMT_NAME(name, number, text) \
  case name:                          \
    return #name;
    SIMT_CUDA_ERRORS(SIMT_NAME)
#undef SIMT_NAME
  }
  return "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
#define SIMT_TEXT(name, number, text) \
  case name:                          \
    return text;
    SIMT_CUDA_ERRORS(SIMT_TEXT)
#undef SIMT_TEXT
  }
  return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
  if (const cudaError_t error = failure_of("cudaGetLastError")) return error;
  return std::exchange(api().last, cudaSuccess);
}

cudaError_t cudaPeekAtLastError() { return api().lost != cudaSuccess ? api().lost : api().last; }

cudaError_t cudaDriverGetVersion(int* version) {  // needs no device
  *version = runtime().driver_version;
  return returned(failure_of("cudaDriverGetVersion"));
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = runtime().runtime_version;
  return returned(failure_of("cudaRuntimeGetVersion"));
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const cudaError_t error = enter("cudaGetDeviceCount")) return error;
  *count = runtime().devices;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const cudaError_t error = enter("cudaSetDevice")) return error;
  if (device < 0 || device >= runtime().devices) return returned(cudaErrorInvalidDevice);
  api().device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (const cudaError_t error = enter("cudaGetDevice")) return error;
  *device = api().device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (const cudaError_t error = enter("cudaGetDeviceProperties")) return error;
  if (device < 0 || device >= runtime().devices) return returned(cudaErrorInvalidDevice);
  *properties = runtime().properties;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const cudaError_t error = enter("cudaDeviceGetAttribute")) return error;
  if (device < 0 || device >= runtime().devices) return returned(cudaErrorInvalidDevice);
  const cudaDeviceProp& p = runtime().properties;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      return cudaSuccess;
    case cudaDevAttrIntegrated:
      *value = p.integrated;
      return cudaSuccess;
    case cudaDevAttrCanMapHostMemory:
      *value = p.canMapHostMemory;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      return cudaSuccess;
  }
  return returned(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = enter("cudaDeviceSynchronize")) return error;
  if (forbidden_by_capture()) return returned(cudaErrorStreamCaptureUnsupported);
  drain_all();
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  if (const cudaError_t error = enter("cudaMemGetInfo")) return error;
  *total = runtime().properties.totalGlobalMem;
  *free = *total - std::min(*total, runtime().others_bytes + api().device_bytes);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return allocate("cudaMalloc", memory, bytes, true);
}
cudaError_t cudaFree(void* memory) { return release("cudaFree", memory, true); }
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return allocate("cudaHostAlloc", memory, bytes, false);
}
cudaError_t cudaFreeHost(void* memory) { return release("cudaFreeHost", memory, false); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  if (const cudaError_t error = enter("cudaHostGetDevicePointer")) return error;
  if (!is_pinned(machine().global.find(host))) return returned(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return copy("cudaMemcpy", to, from, bytes, kind, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy("cudaMemcpyAsync", to, from, bytes, kind, stream, false);
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return set("cudaMemset", memory, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  return set("cudaMemsetAsync", memory, value, bytes, stream);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (const cudaError_t error = enter("cudaStreamCreateWithFlags")) return error;
  *stream = api().streams.add({});
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = enter("cudaStreamDestroy");
  StreamState& s = api().streams.get(stream, "cudaStreamDestroy");
  if (error == cudaSuccess) drain(s);
  api().streams.remove(stream);
  return error;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const cudaError_t error = enter("cudaStreamSynchronize")) return error;
  return give(stream, "cudaStreamSynchronize", [] {}, true);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const cudaError_t error = enter("cudaStreamQuery")) return error;
  if (stream == nullptr) return cudaSuccess;
  StreamState& s = api().streams.get(stream, "cudaStreamQuery");
  if (capturing(s)) {
    s.invalidated = true;
    return returned(cudaErrorStreamCaptureUnsupported);
  }
  if (s.waiting.empty()) return cudaSuccess;
  run_next(s);  // who asks again and again sees it end
  return cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (const cudaError_t error = enter("cudaStreamWaitEvent")) return error;
  EventState& e = api().events.get(event, "cudaStreamWaitEvent");
  if (stream != nullptr && capturing(api().streams.get(stream, "cudaStreamWaitEvent"))) {
    stream->invalidated = true;  // graphs are of one stream here
    return returned(cudaErrorStreamCaptureUnsupported);
  }
  return give(stream, "cudaStreamWaitEvent", [&e] { wait_for(e); });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (const cudaError_t error = enter("cudaEventCreateWithFlags")) return error;
  *event = api().events.add({(flags & cudaEventDisableTiming) == 0});
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t error = enter("cudaEventDestroy");
  EventState& e = api().events.get(event, "cudaEventDestroy");
  if (error == cudaSuccess) wait_for(e);
  api().events.remove(event);
  return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (const cudaError_t error = enter("cudaEventRecord")) return error;
  EventState& e = api().events.get(event, "cudaEventRecord");
  if (stream != nullptr && capturing(api().streams.get(stream, "cudaEventRecord"))) return cudaSuccess;
  e.stream = stream;
  e.done = false;
  return give(stream, "cudaEventRecord", [&e, n = ++e.records] {
    if (n != e.records) return;  // recorded anew since
    e.done = true;
    e.time = std::chrono::steady_clock::now();
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t error = enter("cudaEventSynchronize")) return error;
  wait_for(api().events.get(event, "cudaEventSynchronize"));
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t error = enter("cudaEventQuery")) return error;
  EventState& e = api().events.get(event, "cudaEventQuery");
  if (e.done) return cudaSuccess;
  if (StreamState* const s = api().streams.get_if(e.stream); s != nullptr && !s->waiting.empty())
    run_next(*s);
  return cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (const cudaError_t error = enter("cudaEventElapsedTime")) return error;
  const EventState& a = api().events.get(begin, "cudaEventElapsedTime");
  const EventState& b = api().events.get(end, "cudaEventElapsedTime");
  if (!a.timed || !b.timed || a.records == 0 || b.records == 0) {
    return returned(cudaErrorInvalidResourceHandle);
  }
  if (!a.done || !b.done) return cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(b.time - a.time).count();
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (const cudaError_t error = enter("cudaStreamBeginCapture")) return error;
  if (stream == nullptr) return returned(cudaErrorStreamCaptureUnsupported);
  StreamState& s = api().streams.get(stream, "cudaStreamBeginCapture");
  if (capturing(s)) return returned(cudaErrorInvalidValue);
  s.nodes = std::make_unique<Nodes>();
  s.invalidated = false;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  const cudaError_t error = enter("cudaStreamEndCapture");
  StreamState& s = api().streams.get(stream, "cudaStreamEndCapture");
  if (!capturing(s)) return returned(cudaErrorInvalidValue);
  const std::unique_ptr<Nodes> nodes = std::move(s.nodes);
  if (error != cudaSuccess) return error;
  if (s.invalidated) return returned(cudaErrorStreamCaptureInvalidated);
  *graph = api().graphs.add({std::move(*nodes)});
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (const cudaError_t error = enter("cudaStreamIsCapturing")) return error;
  *status = cudaStreamCaptureStatusNone;
  if (stream == nullptr) return cudaSuccess;
  const StreamState& s = api().streams.get(stream, "cudaStreamIsCapturing");
  if (capturing(s)) {
    *status = s.invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (const cudaError_t error = enter("cudaGraphInstantiate")) return error;
  const Nodes& nodes = api().graphs.get(graph, "cudaGraphInstantiate").nodes;
  *exec = api().execs.add({std::make_shared<const Nodes>(nodes)});
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (const cudaError_t error = enter("cudaGraphLaunch")) return error;
  const auto nodes = api().execs.get(exec, "cudaGraphLaunch").nodes;
  return give(stream, "cudaGraphLaunch", [nodes] {
    for (const Work& node : *nodes) node();
  });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  const cudaError_t error = enter("cudaGraphDestroy");
  api().graphs.get(graph, "cudaGraphDestroy");
  api().graphs.remove(graph);
  return error;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  const cudaError_t error = enter("cudaGraphExecDestroy");
  api().execs.get(exec, "cudaGraphExecDestroy");
  api().execs.remove(exec);
  return error;
}

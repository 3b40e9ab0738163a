#include "simt/runtime_api.h"

#include "simt/runtime_state.h"

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

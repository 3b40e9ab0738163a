// What the stand-ins of runtime_api.h share: streams and what waits in them, failures, what is allocated.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simt/runtime_api.h"

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

struct Failure {
  int nth, times;  // calls until it begins, and while it lasts
  cudaError_t error;
};

Runtime first_runtime();

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
Api& api();

// The start of every call that needs a device.
cudaError_t enter(const char* function);
// What a test wants of this call, or the error that lost the device.
cudaError_t failure_of(const char* function);
// Remembers an error that the call returns, for cudaGetLastError().
cudaError_t returned(cudaError_t error);

inline bool capturing(const StreamState& s) { return s.nodes != nullptr; }
// Where a capture forbids a call, the capture is lost as well.
bool forbidden_by_capture();

// Work of a stream, in its order. `now`: the call returns when it is done.
cudaError_t give(Stream stream, const char* function, Work work, bool now = false);
void run_next(StreamState& s);
void drain(StreamState& s);
void drain_all();
void wait_for(EventState& event);

}  // namespace simt

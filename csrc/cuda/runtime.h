// What the host side of the CUDA backend is written with: errors that say what failed and what to do, and
// owners of device memory, pinned memory, streams, events and graphs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "cuda/launch.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#else
#include "simt/runtime_api.h"
#endif

namespace ringlm::cuda {

// Throws OutOfMemory for cudaErrorMemoryAllocation, else DeviceError; does nothing on success. `operation` is
// what was being done: "copying weights".
void check(cudaError_t error, const char* operation);

// Whether the error ends this process's use of the GPU: every later call would return it.
bool device_is_lost(cudaError_t error);

// ---- the device

struct DeviceInfo {
  int index;
  std::string name;
  int major, minor;  // compute capability
  int n_sm;          // streaming multiprocessors
  bool integrated;   // its memory is the machine's
  std::size_t total_memory;
  std::size_t most_shared;  // bytes of shared memory that a block may opt in to
  std::size_t l2_bytes;
  int driver_version, runtime_version;  // 1000 major + 10 minor
};

// 0 where there is no GPU or no driver; never throws.
int device_count() noexcept;

// Makes the device that of this thread. Throws DeviceError where there is none, or it cannot be used.
void use_device(int index);

// The same of a device that was used before, cheap enough for every step.
void select_device(int index);

DeviceInfo device_info();  // of this thread's device

// Bytes of device memory that can still be had. On a GPU that shares the machine's memory, that is what the
// host says is available: cudaMemGetInfo takes pages of files for used there, the model's own among them.
std::size_t free_device_memory();

// ---- owners. Their destructors never throw: after an error the device may be gone.

enum class Where {
  Device,  // 256-byte aligned
  Pinned,  // on the host: the device copies it by itself, and kernels may read it
};

template <Where kWhere>
class Memory {
 public:
  Memory() = default;
  // `what` names the use, for the message.
  Memory(std::size_t bytes, const char* what);
  ~Memory();
  Memory(Memory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return bytes_; }
  std::span<std::uint8_t> span() const { return {data_, bytes_}; }
  template <class T>
  T* as(std::size_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t bytes_ = 0;
};
extern template class Memory<Where::Device>;
extern template class Memory<Where::Pinned>;
using DeviceMemory = Memory<Where::Device>;
using PinnedMemory = Memory<Where::Pinned>;

// A stream that does not wait for the null stream.
class StreamHandle {
 public:
  StreamHandle();
  ~StreamHandle();
  StreamHandle(StreamHandle&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  StreamHandle& operator=(StreamHandle&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  Stream get() const { return stream_; }
  void synchronize(const char* operation) const;

 private:
  Stream stream_ = nullptr;
};

class Event {
 public:
  enum class Timing { Off, On };
  explicit Event(Timing timing = Timing::Off);
  ~Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  cudaEvent_t get() const { return event_; }
  void record(Stream stream);
  void wait(const char* operation) const;      // the host does; at once where it was never recorded
  float ms_since(const Event& earlier) const;  // both with Timing::On, and done

 private:
  cudaEvent_t event_ = nullptr;
};

// Launches and copies that were captured once and run as one.
class Graph {
 public:
  Graph() = default;
  // What `work` gives to the stream is captured, not run.
  template <class Work>
  Graph(Stream stream, Work work) {
    begin(stream);
    try {
      work();
    } catch (...) {
      abandon(stream);
      throw;
    }
    end(stream);
  }
  ~Graph();
  Graph(Graph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  explicit operator bool() const { return exec_ != nullptr; }
  void launch(Stream stream) const;

  // The same in pieces: what comes to the stream from begin() to end() is captured.
  static void begin(Stream stream);
  static void abandon(Stream stream) noexcept;
  void end(Stream stream);

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// A range with a name in the timeline of Nsight Systems.
class Range {
 public:
#if defined(__CUDACC__)
  explicit Range(const char* name) { nvtxRangePushA(name); }
  ~Range() { nvtxRangePop(); }
#else
  explicit Range(const char*) {}
  ~Range() {}
#endif
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace ringlm::cuda

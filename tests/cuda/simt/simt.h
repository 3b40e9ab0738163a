// A SIMT executor: runs CUDA kernels on the host, for tests. g++ compiles the same kernel headers that nvcc
// does, against csrc/cuda/port.h. Every CUDA thread is a fiber, which runs until it needs others of its
// warp or block. Launches come from plain C++:
//
//   simt::Buffer<float> x("x", 1000), sum("sum", 1);  // device memory: exact size, 256-byte alignment
//   LAUNCH(block_sum, dim3(1), dim3(256), 0, nullptr, x.data(), 1000, sum.data());  // throws Fault
//   simt::report().line(simt::Op::kGlobalLoad, "kernels.h", 12).sectors;
//
// What it shows, with kernel, source line, block and thread:
//   - In every build: global accesses outside of a buffer, or misaligned; accesses by ld_shared and
//     st_shared outside of an array; collectives whose lanes, lines or masks disagree; barriers that not
//     all threads reach; copies of cp.async that are read before they were waited for, or never waited for.
//     Memory that nothing has written holds NaNs (0xff): device memory once allocated, shared memory before
//     each block. What a plain store wrote around a buffer is seen after the launch, without line and
//     thread.
//   - Race build (compiled with -fsanitize=thread, whose callbacks in races.cpp stand in for its library):
//     two accesses of which one is a write and which nothing puts in order, in shared or global memory,
//     within a block or between blocks; reads of shared memory that this block has not written; global
//     accesses that bypass ld_global and st_global, counted. All of the above for plain accesses too.
//   - ASan and UBSan build: plain accesses outside of buffers and arrays end the process.
// What it counts: for each source line, requests of warps, their 32-byte sectors, and wavefronts of the
// banks of shared memory (by ld_shared, st_shared and cp.async); for each buffer, bytes and sectors moved,
// and distinct bytes touched, to hold against the floor that a kernel states.
//
// What it does not show: time, occupancy, registers; the rounding of approximate instructions, and the
// order of sums inside mma (here they are double); bugs of ptxas; caches, and so which sectors reach DRAM;
// weak memory order, beyond what the race build says. A thread runs on until it waits, and blocks run one
// after another: run a kernel in all three orders.
// Stricter than hardware: threads that exit before a barrier of others, and shuffles from lanes outside of
// the mask, are faults; a __syncwarp() of a part of the live lanes orders no memory.
// Approximate: the k-th access of a line by each lane is of one request, counted from where all lanes of
// the warp last met, which may pair the wrong ones after lanes diverged; calls of memcpy and memset on
// shared memory are seen by ASan alone.
//
// One host thread at a time, one device, and nothing at the same time as anything else: streams run late at
// most (runtime_api.h). A fault leaves device memory as it was at that moment.
//
// nvcc compiles the same tests for a GPU, where gpu/device.cu defines what is declared here: kHardware.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "simt/builtins.h"
#endif

namespace simt {

// The order of blocks, and of the warps and lanes of a block that could run.
enum class Order { kForward, kBackward, kRandom };

struct Options {
  Order order = Order::kForward;
  unsigned seed = 1;                     // of kRandom
  std::size_t shared_limit = 48 * 1024;  // of a block: what a launch may have without opting in to more
  bool count = true;                     // the counters of report()
};
Options& options();

// The first thing found wrong in a launch. what() has everything in one line.
class Fault : public std::runtime_error {
 public:
  Fault(const std::string& message, std::string kernel_, std::string file_, int line_, dim3 block_,
        dim3 thread_)
      : std::runtime_error(message),
        kernel(std::move(kernel_)),
        file(std::move(file_)),
        line(line_),
        block(block_),
        thread(thread_) {}
  std::string kernel, file;  // file without its folders; empty, and line 0, where there is no such place
  int line;
  dim3 block, thread;
};

constexpr bool kRaceBuild =
#if defined(SIMT_RACES)
    true;
#else
    false;
#endif

// On a GPU there is one order, its own, and nothing is counted.
constexpr bool kHardware =
#if defined(__CUDACC__)
    true;
#else
    false;
#endif

// ---- host side. Streams, and the rest of the runtime API that a backend calls (cudaMalloc, cudaMemcpyAsync,
// events, graphs), are in simt/runtime_api.h. On the null stream, launches run at once.
struct StreamState;
using Stream = StreamState*;

struct Launch {
  std::string kernel;
  dim3 grid, block;
  std::size_t shared_bytes;
  std::function<void()> body;  // of one thread, with the arguments as they were at the launch
  const void* function = nullptr;
  std::size_t shared_limit = 0;  // what the function opted in to, where that is more than options() has
};
void run(const Launch& launch);  // throws Fault
// Runs it, now or when the stream gets there, or makes it a node of the graph that the stream captures.
void submit(Launch launch, Stream stream);

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, std::size_t shared_bytes,
            Stream stream, Arguments&&... arguments) {
  const std::tuple<Parameters...> copied(std::forward<Arguments>(arguments)...);
  submit({name, grid, block, shared_bytes, [kernel, copied] { std::apply(kernel, copied); },
          reinterpret_cast<const void*>(kernel)},
         stream);
}

// Device memory, aligned to 256 bytes, between guards, for the host too. The name is for messages.
void* device_alloc(std::size_t bytes, std::string name);
void device_free(void* memory);

template <class T>
class Buffer {
 public:
  Buffer(std::string name, std::size_t count)
      : data_(static_cast<T*>(device_alloc(count * sizeof(T), std::move(name)))), size_(count) {}
  Buffer(std::string name, const std::vector<T>& values) : Buffer(std::move(name), values.size()) {
    std::copy(values.begin(), values.end(), data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { device_free(data_); }
  T* data() { return data_; }
  std::size_t size() const { return size_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  T* data_;
  std::size_t size_;
};

// ---- counters, since reset_report()

enum class Op { kGlobalLoad, kGlobalStore, kGlobalAtomic, kSharedLoad, kSharedStore };

struct LineCount {
  std::string file;  // without its folders
  int line;
  Op op;                       // cp.async16 is a global load and a shared store
  std::uint64_t requests = 0;  // instructions of a warp
  std::uint64_t bytes = 0;     // of all lanes
  // Global memory: 32-byte sectors touched by each request, and how many its distinct bytes would fill.
  // Shared memory: wavefronts, and how many there would be without bank conflicts.
  std::uint64_t sectors = 0, least_sectors = 0;
  std::uint64_t wavefronts = 0, least_wavefronts = 0;
};

struct BufferCount {
  std::string name;
  std::uint64_t size;
  std::uint64_t bytes_read = 0, bytes_written = 0;    // of all lanes; an atomic is both
  std::uint64_t unique_read = 0, unique_written = 0;  // distinct bytes
  std::uint64_t sectors_read = 0, sectors_written = 0;
};

struct Report {
  std::vector<LineCount> lines;
  std::vector<BufferCount> buffers;
  std::uint64_t blocks = 0, switches = 0, collectives = 0, barriers = 0;
  // Race build: global accesses that bypass ld_global and st_global, and their lines as "file:line".
  std::uint64_t bypasses = 0;
  std::vector<std::string> bypass_lines;

  // All zero where the line has no such access.
  LineCount line(Op op, const std::string& file, int line) const;
  BufferCount buffer(const std::string& name) const;  // throws std::out_of_range
};
Report report();
void reset_report();
std::string to_string(const Report& report);  // a table of lines and one of buffers

}  // namespace simt

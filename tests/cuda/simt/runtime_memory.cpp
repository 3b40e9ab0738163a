// The stand-ins that allocate, copy and set.
#include <cstring>

#include "simt/machine.h"
#include "simt/runtime_state.h"

namespace simt {

namespace {

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

}  // namespace simt

using namespace simt;

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

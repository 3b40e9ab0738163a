// Counts the heap allocations of the extension module, for traces: "none after opening" is a figure, not a
// claim. The library itself leaves operator new alone, and the module binds to its own
// (-Bsymbolic-functions).
#include <atomic>
#include <cstdlib>
#include <new>

#include "bindings/bindings.h"

namespace {

std::atomic<std::int64_t> count{0};

void* take(std::size_t n, std::size_t alignment) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (n == 0) n = 1;
  void* p = alignment == 0 ? std::malloc(n)
                           : std::aligned_alloc(alignment, (n + alignment - 1) / alignment * alignment);
  if (!p) throw std::bad_alloc();
  return p;
}

}  // namespace

// Not inlined: GCC would take malloc and free for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t n) { return take(n, 0); }
[[gnu::noinline]] void* operator new(std::size_t n, std::align_val_t a) {
  return take(n, static_cast<std::size_t>(a));
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace ringlm::bindings {

std::int64_t heap_allocations() { return count.load(std::memory_order_relaxed); }

}  // namespace ringlm::bindings

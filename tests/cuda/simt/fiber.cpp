#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

namespace context = boost::context::detail;

// AddressSanitizer has to know which stack it is on. Each switch is announced before and confirmed behind it.
struct FiberSwitch {
  static inline Fiber* running = nullptr;
  static inline context::fcontext_t scheduler = nullptr;
  [[maybe_unused]] static inline const void* scheduler_stack = nullptr;
  [[maybe_unused]] static inline std::size_t scheduler_size = 0;
  [[maybe_unused]] static inline void* scheduler_fake = nullptr;

  static void to_fiber([[maybe_unused]] Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake, fiber.stack_, Fiber::kStackBytes);
#endif
  }
  static void in_scheduler() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
#endif
  }
  static void to_scheduler([[maybe_unused]] void** keep_fake) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(keep_fake, scheduler_stack, scheduler_size);
#endif
  }
  static void in_fiber([[maybe_unused]] Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack_, &scheduler_stack, &scheduler_size);
#endif
  }

  static void enter(context::transfer_t from) {
    scheduler = from.fctx;
    Fiber& fiber = *running;
    in_fiber(fiber);
    fiber.body_();
    fiber.leave();
  }
};

Fiber* Fiber::running() { return FiberSwitch::running; }

Fiber::~Fiber() {
  if (stack_ != nullptr) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    munmap(stack_ - page, kStackBytes + page);
  }
}

void Fiber::prepare(void (*body)()) {
  if (stack_ == nullptr) {  // with a page below it that stops an overflow
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page, PROT_NONE);
    stack_ = static_cast<std::byte*>(memory) + page;
  }
#if defined(__SANITIZE_ADDRESS__)
  if (entered_) ASAN_UNPOISON_MEMORY_REGION(stack_, kStackBytes);  // frames that were dropped
#endif
  entered_ = false;
  fake_stack_ = nullptr;
  body_ = body;
  context_ = context::make_fcontext(stack_ + kStackBytes, kStackBytes, FiberSwitch::enter);
}

void Fiber::resume() {
  entered_ = true;
  FiberSwitch::running = this;
  FiberSwitch::to_fiber(*this);
  context_ = context::jump_fcontext(context_, nullptr).fctx;
  FiberSwitch::in_scheduler();
  FiberSwitch::running = nullptr;
}

void Fiber::suspend() {
  FiberSwitch::to_scheduler(&fake_stack_);
  FiberSwitch::scheduler = context::jump_fcontext(FiberSwitch::scheduler, nullptr).fctx;
  FiberSwitch::in_fiber(*this);
}

void Fiber::leave() {
  FiberSwitch::to_scheduler(nullptr);
  context::jump_fcontext(FiberSwitch::scheduler, nullptr);
  std::abort();  // a fiber that has left is never resumed
}

bool Fiber::holds(const void* address) const {
  return reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(stack_) < kStackBytes;
}

}  // namespace simt

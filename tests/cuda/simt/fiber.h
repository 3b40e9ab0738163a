// A stack of its own, entered and left by switching. One fiber runs at a time, over the scheduler's stack.
#pragma once

#include <cstddef>

namespace simt {

class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber();

  // Makes the next resume() call body() from the top; what ran here before is dropped, without destructors.
  void prepare(void (*body)());
  // From the scheduler: runs the fiber until it suspends or leaves.
  void resume();
  // From the fiber.
  void suspend();
  [[noreturn]] void leave();

  bool holds(const void* address) const;  // on its stack
  static Fiber* running();                // null on the scheduler's stack

 private:
  static constexpr std::size_t kStackBytes = 256 * 1024;
  std::byte* stack_ = nullptr;
  void* context_ = nullptr;
  void (*body_)() = nullptr;
  void* fake_stack_ = nullptr;  // AddressSanitizer's
  bool entered_ = false;
  friend struct FiberSwitch;
};

}  // namespace simt

// A persistent team of threads that runs one operation at a time.
//
// The caller is thread 0. Between operations the others spin for some microseconds, since in a decode step
// the next operation follows at once, then sleep.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace ringlm::cpu {

// Cores that this process may use: its affinity mask, limited by the quota of its control group.
int default_thread_count();

// The part [begin, end) of n items that thread `i` of `count` owns.
struct Share {
  std::int64_t begin, end;
};
constexpr Share share(std::int64_t n, int i, int count) { return {n * i / count, n * (i + 1) / count}; }

// A counter that threads wait for: they spin for a while, then sleep. (std::atomic::wait() would do, but
// libstdc++'s calls sched_yield() first, which on a busy machine gives away whole time slices.)
class Gate {
 public:
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void advance();                     // adds one; what happened before is seen by those who waited
  void wait_past(std::uint32_t old);  // returns when the value is no longer `old`

 private:
  std::atomic<std::uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  static_assert(sizeof(value_) == 4 && std::atomic<std::uint32_t>::is_always_lock_free, "a futex is 32 bits");
};

class Team {
 public:
  explicit Team(int n_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Calls f(thread) once on every thread and returns when all have. One run at a time: a second caller waits.
  // f must not throw.
  template <class F>
  void run(F&& f) {
    std::lock_guard lock(run_mutex_);
    using Body = std::remove_reference_t<F>;
    dispatch([](void* body, int thread) { (*static_cast<Body*>(body))(thread); }, &f);
  }

  // Inside run(): returns when every thread has come here.
  void barrier();

 private:
  using Call = void (*)(void* body, int thread);
  void dispatch(Call call, void* body);
  void work(int thread);
  void join();

  const int size_;
  const ::pid_t owner_;  // threads do not survive a fork; a child must not wait for them
  std::mutex run_mutex_;
  Call call_ = nullptr;
  void* body_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) Gate generation_;  // counts dispatched runs
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) Gate phase_;             // counts barriers passed
  std::vector<std::thread>* threads_;  // leaked in a forked child, where joining would hang
};

}  // namespace ringlm::cpu

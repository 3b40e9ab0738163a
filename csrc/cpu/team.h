// A persistent team of threads that runs one operation at a time.
//
// The caller is thread 0. Between operations the others spin for some microseconds, since in a decode step
// the next operation follows at once, then sleep.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
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

constexpr std::size_t kCacheLine = 64;

// Hands out n items, `grain` at a time, to whichever thread asks: a thread that was kept from its core then
// holds up the others by one grain at most. Lives on the stack of the caller of Team::run(), one per loop;
// all threads pass the same n and grain.
//
//   Claims claims;
//   team.run([&](int) {
//     for (std::int64_t begin, end; claims.take(n, grain, begin, end);) work(begin, end);
//   });
class Claims {
 public:
  bool take(std::int64_t n, std::int64_t grain, std::int64_t& begin, std::int64_t& end) {
    begin = next_.fetch_add(grain, std::memory_order_relaxed);
    if (begin >= n) return false;
    end = std::min(begin + grain, n);
    return true;
  }

 private:
  alignas(kCacheLine) std::atomic<std::int64_t> next_{0};
};

// The same, but thread i begins with its own share(n, i, count), so that it reads the same part of the
// weights in every step and meets nobody; then it helps the thread that has most left.
class LocalClaims {
 public:
  LocalClaims(std::int64_t n, std::int64_t grain, int count)
      : n_(n), grain_(grain), parts_(std::min(count, kMostParts)) {
    for (int p = 0; p < parts_; ++p) next_[part(p)].value.store(share(n, p, parts_).begin, relaxed);
  }

  bool take(int thread, std::int64_t& begin, std::int64_t& end) {
    for (int p = thread % parts_;;) {
      const std::int64_t last = share(n_, p, parts_).end;
      if (next_[part(p)].value.load(relaxed) < last) {
        begin = next_[part(p)].value.fetch_add(grain_, relaxed);
        end = std::min(begin + grain_, last);
        if (begin < last) return true;
      }
      std::int64_t most = 0;
      for (int other = 0; other < parts_; ++other) {
        const std::int64_t left = share(n_, other, parts_).end - next_[part(other)].value.load(relaxed);
        if (left > most) most = left, p = other;
      }
      if (most == 0) return false;
    }
  }

 private:
  static constexpr int kMostParts = 64;  // threads beyond share one
  static constexpr auto relaxed = std::memory_order_relaxed;
  static constexpr std::size_t part(int p) { return static_cast<std::size_t>(p); }
  struct alignas(kCacheLine) Next {
    std::atomic<std::int64_t> value;
  };
  std::int64_t n_, grain_;
  int parts_;
  std::array<Next, kMostParts> next_;
};

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

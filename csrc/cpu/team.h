// A persistent team of threads that runs one operation at a time, and what divides the work of an operation.
//
// The caller is thread 0. Between operations the others spin for some microseconds, since in a decode step
// the next operation follows at once, then sleep: an idle team costs nothing.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace ringlm::cpu {

// Physical cores that this process may use (host/topology.h), limited by the quota of its control group.
int default_thread_count();

// The part [begin, end) of n items that thread `i` of `count` owns.
struct Share {
  std::int64_t begin, end;
};
constexpr Share share(std::int64_t n, int i, int count) { return {n * i / count, n * (i + 1) / count}; }

constexpr std::size_t kCacheLine = 64;

// Hands out n items, a piece at a time, to whichever thread asks. Thread i begins with its own
// share(n, i, count), so that it reads the same part of the weights in every step and meets nobody: half of
// what is left of it at a time, since taking a piece costs as much as a kilobyte of weights. Then it helps
// the thread that has most left, `grain` items at a time. Lives on the stack of the caller of Team::run().
//
//   Claims claims(n, grain, team.size());
//   team.run([&](int thread) {
//     for (std::int64_t begin, end; claims.take(thread, begin, end);) work(begin, end);
//   });
class Claims {
 public:
  Claims(std::int64_t n, std::int64_t grain, int count)
      : n_(n), grain_(grain), parts_(std::min(count, kMostParts)) {
    for (int p = 0; p < parts_; ++p) next_[part(p)].value.store(share(n, p, parts_).begin, relaxed);
  }

  bool take(int thread, std::int64_t& begin, std::int64_t& end) {
    const int own = thread % parts_;
    for (int p = own;;) {
      if (const std::int64_t n = left(p); n > 0) {
        const std::int64_t piece = p == own ? std::max(grain_, n / 2) : grain_;
        const std::int64_t last = share(n_, p, parts_).end;
        begin = next_[part(p)].value.fetch_add(piece, relaxed);
        end = std::min(begin + piece, last);
        if (begin < last) return true;
      }
      std::int64_t most = 0;
      for (int other = 0; other < parts_; ++other) {
        if (const std::int64_t n = left(other); n > most) most = n, p = other;
      }
      if (most == 0) return false;
    }
  }

 private:
  std::int64_t left(int p) const { return share(n_, p, parts_).end - next_[part(p)].value.load(relaxed); }

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

// A number that threads count up and wait for: they spin for a while, then sleep. (std::atomic::wait() would
// do, but libstdc++'s calls sched_yield() first, which on a busy machine gives away whole time slices.)
class Counter {
 public:
  // Adds one and returns the new value. What happened before is seen by those who wait for it.
  std::uint32_t add() { return value_.fetch_add(1) + 1; }
  // After the add() that somebody may wait for.
  void wake();
  // Returns when the value has come to `target`, or up to 2^31 past it.
  void wait_for(std::uint32_t target);
  // Starts again at 0. Nobody may be in wait_for().
  void reset() { value_.store(0, std::memory_order_relaxed); }
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }

 private:
  bool reached(std::uint32_t target) const { return static_cast<std::int32_t>(value() - target) >= 0; }

  std::atomic<std::uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  static_assert(sizeof(value_) == 4 && std::atomic<std::uint32_t>::is_always_lock_free, "a futex is 32 bits");
};

// Who may run when several threads use one team. Whoever has the turn keeps it for a millisecond, over many
// operations, before the next gets one: changing hands after every operation of ten microseconds takes as
// long as the operation.
class Turns {
 public:
  void lock();
  void unlock();

 private:
  std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  bool running_ = false;
  std::thread::id owner_;
  std::chrono::steady_clock::time_point ends_;  // of the owner's turn, if somebody waits
  std::uint64_t first_ = 0, last_ = 0;          // tickets of those who wait: [first, last)
};

class Team {
 public:
  explicit Team(int n_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The process's team of this size: everyone who asks while it is in use gets the same one. From any
  // thread; a child of fork() gets a team of its own.
  static std::shared_ptr<Team> shared(int n_threads);

  int size() const { return size_; }

  // Calls f(thread) once on every thread and returns when all have. One run at a time: a second caller waits
  // for its turn. f must not throw (the process would end) nor call run() of the same team.
  template <class F>
  void run(F&& f) {
    std::lock_guard turn(members_->turns);
    using Body = std::remove_reference_t<F>;
    dispatch([](void* body, int thread) noexcept { (*static_cast<Body*>(body))(thread); }, &f);
  }

  // Inside run(): returns when every thread has come here.
  void barrier();

 private:
  using Call = void (*)(void* body, int thread) noexcept;
  void dispatch(Call call, void* body);
  void work(int thread);
  std::uint32_t arrive();
  void join();

  struct Members {
    std::vector<std::thread> threads;
    Turns turns;
  };

  const int size_;
  const ::pid_t owner_;  // threads do not survive a fork; a child must not wait for them
  Members* members_;     // leaked in a forked child, where others will hold what they held for ever
  // What a run begins with, on one cache line, and what it ends with, on another.
  alignas(kCacheLine) Counter started_;  // runs
  Call call_ = nullptr;
  void* body_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(kCacheLine) Counter arrived_;  // threads, at barriers and at the end: size_ of them open it
};

}  // namespace ringlm::cpu

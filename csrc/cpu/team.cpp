#include "cpu/team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <string>
#include <system_error>

#include "host/cgroup.h"
#include "ringlm/error.h"

namespace ringlm::cpu {
namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kLongestSpin = std::chrono::microseconds(50);

int affinity_count() {
  ::cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());  // more cores than the mask holds
}

}  // namespace

void Gate::advance() {
  // Both sequentially consistent: either the sleeper is seen here, or it sees the new value.
  value_.fetch_add(1);
  if (sleepers_.load() > 0) ::syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// On a free machine the others are a few microseconds away, and waking a sleeper costs more than that. Where
// threads outnumber cores, whoever spins keeps its core from the one that it waits for. So every thread
// learns from its own waits how long spinning is worth while: quick to give up, slow to trust again.
void Gate::wait_past(std::uint32_t old) {
  thread_local Clock::duration spin = kLongestSpin;
  const Clock::time_point start = Clock::now();
  bool sleep = false;
  while (!sleep) {
    for (int i = 0; i < 16 && value() == old; ++i) pause();
    if (value() != old) break;
    sleep = Clock::now() - start >= spin;
  }
  if (sleep) {
    sleepers_.fetch_add(1);
    // The kernel looks again before it puts the thread to sleep.
    while (value_.load() == old) ::syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
  }
  if (sleep && Clock::now() - start >= kLongestSpin) {
    spin /= 2;
  } else {
    spin += (kLongestSpin - spin) / 8;
  }
}

int default_thread_count() {
  const double quota = std::round(host::cgroup_cpus().value_or(256.0));
  return std::clamp(static_cast<int>(std::min<double>(affinity_count(), quota)), 1, 256);
}

Team::Team(int n_threads) : size_(n_threads), owner_(::getpid()), threads_(new std::vector<std::thread>) {
  try {
    for (int i = 1; i < size_; ++i) threads_->emplace_back([this, i] { work(i); });
  } catch (const std::system_error& e) {
    const std::size_t started = threads_->size() + 1;
    join();
    throw DeviceError("the system started only " + std::to_string(started) + " of " + std::to_string(size_) +
                      " threads (" + e.what() + "); ask for fewer");
  }
}

Team::~Team() {
  if (::getpid() == owner_) join();
}

void Team::join() {
  stop_ = true;
  generation_.advance();
  for (std::thread& t : *threads_) t.join();
  delete threads_;
}

void Team::dispatch(Call call, void* body) {
  if (size_ > 1) {
    call_ = call;
    body_ = body;
    generation_.advance();
  }
  call(body, 0);
  barrier();
}

void Team::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    generation_.wait_past(seen);
    ++seen;
    if (stop_) return;
    call_(body_, thread);
    barrier();
  }
}

void Team::barrier() {
  if (size_ == 1) return;
  const std::uint32_t phase = phase_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.advance();
  } else {
    phase_.wait_past(phase);
  }
}

}  // namespace ringlm::cpu

#include "cpu/team.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <system_error>

#include "kv/cgroup.h"
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

constexpr int kSpins = 4000;  // about 50 microseconds
constexpr int kYields = 200;

// Returns when `value` is no longer `old`.
void wait_for_change(const std::atomic<std::uint32_t>& value, std::uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    ::sched_yield();
  }
  value.wait(old, std::memory_order_acquire);
}

// The addition is sequentially consistent, and not merely a release, because notify_all() looks for sleepers
// with a plain load: were that to overtake the store, a thread could go to sleep in between and stay asleep.
void announce(std::atomic<std::uint32_t>& value) {
  value.fetch_add(1);
  value.notify_all();
}

int affinity_count() {
  ::cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());  // more cores than the mask holds
}

}  // namespace

int default_thread_count() {
  const double quota = std::round(kv::cgroup_cpus().value_or(256.0));
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
  announce(generation_);
  for (std::thread& t : *threads_) t.join();
  delete threads_;
}

void Team::dispatch(Call call, void* body) {
  if (size_ > 1) {
    call_ = call;
    body_ = body;
    announce(generation_);
  }
  call(body, 0);
  barrier();
}

void Team::work(int thread) {
  std::uint32_t seen = 0;
  for (;;) {
    wait_for_change(generation_, seen);
    ++seen;
    if (stop_) return;
    call_(body_, thread);
    barrier();
  }
}

void Team::barrier() {
  if (size_ == 1) return;
  const std::uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    announce(phase_);
  } else {
    wait_for_change(phase_, phase);
  }
}

}  // namespace ringlm::cpu

#include "cpu/team.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <system_error>

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
template <class T>
void wait_for_change(const std::atomic<T>& value, T old) {
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

int affinity_count() {
  ::cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());  // more cores than the mask holds
}

// "quota period" in microseconds, or "max period".
int cgroup_quota() {
  std::ifstream in("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (in >> quota >> period && quota > 0 && period > 0)
    return std::max(1, static_cast<int>(std::lround(quota / period)));
  return 1 << 16;
}

}  // namespace

int default_thread_count() { return std::clamp(std::min(affinity_count(), cgroup_quota()), 1, 256); }

Team::Team(int n_threads) : size_(n_threads), owner_(::getpid()), threads_(new std::vector<std::thread>) {
  try {
    for (int i = 1; i < size_; ++i) threads_->emplace_back([this, i] { work(i); });
  } catch (const std::system_error& e) {
    const std::size_t started = threads_->size() + 1;
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& t : *threads_) t.join();
    delete threads_;
    throw DeviceError("the system started only " + std::to_string(started) + " of " + std::to_string(size_) +
                      " threads (" + e.what() + "); ask for fewer");
  }
}

Team::~Team() {
  if (::getpid() != owner_) return;
  stop_ = true;
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  for (std::thread& t : *threads_) t.join();
  delete threads_;
}

void Team::dispatch(Call call, void* body) {
  if (size_ > 1) {
    call_ = call;
    body_ = body;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
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
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
  } else {
    wait_for_change(phase_, phase);
  }
}

}  // namespace ringlm::cpu

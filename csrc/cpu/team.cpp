#include "cpu/team.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <map>
#include <string>
#include <system_error>

#include "host/cgroup.h"
#include "host/topology.h"
#include "ringlm/error.h"

namespace ringlm::cpu {
namespace {

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" does nothing on most cores
#endif
}

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kLongestSpin = std::chrono::microseconds(50);
constexpr Clock::duration kTurn = std::chrono::milliseconds(1);

}  // namespace

void Counter::wake() {
  // Sequentially consistent, as is add(): either the sleeper is seen here, or it sees the new value.
  if (sleepers_.load() > 0) ::syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// On a free machine the others are a few microseconds away, and waking a sleeper costs more than that. Where
// threads outnumber cores, whoever spins keeps its core from the one that it waits for. So every thread
// learns from its own waits how long spinning is worth while: quick to give up, trying again now and then.
void Counter::wait_for(std::uint32_t target) {
  constexpr int kLooks = 16;  // between readings of the clock: up to a microsecond where a pause is long
  for (int i = 0; i < kLooks; ++i) {
    if (reached(target)) return;
    pause();
  }
  constexpr int kTryAgain = 64;
  thread_local Clock::duration spin = kLongestSpin;
  thread_local int in_vain = 0;
  const Clock::time_point end = Clock::now() + spin;
  do {
    for (int i = 0; i < kLooks; ++i) {
      if (reached(target)) {
        spin += (kLongestSpin - spin) / 8;
        return;
      }
      pause();
    }
  } while (Clock::now() < end);
  spin = ++in_vain % kTryAgain == 0 ? kLongestSpin : spin / 2;
  sleepers_.fetch_add(1);
  for (std::uint32_t now; static_cast<std::int32_t>((now = value_.load()) - target) < 0;) {
    // The kernel looks again before it puts the thread to sleep.
    ::syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
  }
  sleepers_.fetch_sub(1);
}

void Turns::lock() {
  std::unique_lock lock(mutex_);
  const auto me = std::this_thread::get_id();
  const auto mine = [&] { return owner_ == me && Clock::now() < ends_; };
  if (running_ || (first_ != last_ && !mine())) {
    if (first_ == last_) ends_ = Clock::now() + kTurn;
    const std::uint64_t ticket = last_++;
    for (;;) {
      const bool over = Clock::now() >= ends_;
      if (ticket == first_ && over && !running_) break;
      if (ticket == first_ && !over) {
        changed_.wait_until(lock, ends_);  // the owner may do something else in its turn
      } else {
        changed_.wait(lock);
      }
    }
    ends_ = Clock::now() + kTurn;
    if (++first_ != last_) changed_.notify_all();
  }
  owner_ = me;
  running_ = true;
}

void Turns::unlock() {
  std::lock_guard lock(mutex_);
  running_ = false;
  if (first_ != last_ && Clock::now() >= ends_) changed_.notify_all();
}

int default_thread_count() {
  const double quota = std::round(host::cgroup_cpus().value_or(256.0));
  const auto cores = static_cast<double>(host::compute_cores(host::allowed_cpus()).size());
  return static_cast<int>(std::clamp(std::min(cores, quota), 1.0, 256.0));
}

Team::Team(int n_threads) : size_(n_threads), owner_(::getpid()), members_(new Members) {
  try {
    for (int i = 1; i < size_; ++i) members_->threads.emplace_back([this, i] { work(i); });
  } catch (const std::system_error& e) {
    const std::size_t started = members_->threads.size() + 1;
    join();
    throw DeviceError("the system started only " + std::to_string(started) + " of " + std::to_string(size_) +
                      " threads (" + e.what() + "); ask for fewer");
  } catch (...) {  // no memory
    join();
    throw;
  }
}

Team::~Team() {
  if (::getpid() == owner_) join();
}

void Team::join() {
  stop_ = true;
  started_.add();
  started_.wake();
  for (std::thread& t : members_->threads) t.join();
  delete members_;
}

std::shared_ptr<Team> Team::shared(int n_threads) {
  struct Registry {
    const ::pid_t process = ::getpid();
    std::mutex mutex;
    std::map<int, std::weak_ptr<Team>> teams;
  };
  // A child of fork() leaves its parent's alone: another thread may have held the mutex.
  static std::atomic<Registry*> current{nullptr};
  Registry* registry = current.load();
  if (!registry || registry->process != ::getpid()) {
    auto fresh = std::make_unique<Registry>();
    if (current.compare_exchange_strong(registry, fresh.get())) registry = fresh.release();
  }
  std::lock_guard lock(registry->mutex);
  std::weak_ptr<Team>& known = registry->teams[n_threads];
  std::shared_ptr<Team> team = known.lock();
  if (!team) known = team = std::make_shared<Team>(n_threads);
  return team;
}

void Team::dispatch(Call call, void* body) {
  if (size_ == 1) return call(body, 0);
  constexpr std::uint32_t kFar = std::uint32_t{1} << 30;
  if (arrived_.value() >= kFar) arrived_.reset();
  call_ = call;
  body_ = body;
  started_.add();
  started_.wake();
  call(body, 0);
  barrier();
}

void Team::work(int thread) {
  for (std::uint32_t run = 1;; ++run) {
    started_.wait_for(run);
    if (stop_) return;
    call_(body_, thread);
    arrive();
  }
}

// Counts this thread; whoever completes the team opens the barrier. Between runs the count is a multiple of
// size_, and far from its limit.
std::uint32_t Team::arrive() {
  const auto size = static_cast<std::uint32_t>(size_);
  const std::uint32_t n = arrived_.add();
  const std::uint32_t complete = (n + size - 1) / size * size;
  if (n == complete) arrived_.wake();
  return complete;
}

void Team::barrier() {
  if (size_ > 1) arrived_.wait_for(arrive());
}

}  // namespace ringlm::cpu

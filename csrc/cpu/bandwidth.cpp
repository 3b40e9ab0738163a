#include "cpu/bandwidth.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <limits>
#include <string>
#include <system_error>

#include "cpu/bandwidth_body.h"
#include "cpu/team.h"
#include "host/memory.h"
#include "ringlm/error.h"

namespace ringlm::cpu {

constinit const ReadPatterns kReadGeneric = kRead<16>;

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

const ReadPatterns& patterns() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return kReadAvx512;
  if (__builtin_cpu_supports("avx2")) return kReadAvx2;
#endif
  return kReadGeneric;
}

// An anonymous mapping aligned to a huge page, not touched yet.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : mapped_(bytes + kHugePage) {
    const std::string what = host::format_bytes(bytes) + " to measure reading with";
    if (const std::size_t left = host::available_memory(); mapped_ > left) {
      throw OutOfMemory(what + " are more than the " + host::format_bytes(left) + " that are free");
    }
    base_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) {
      throw OutOfMemory("the system refuses " + what + ": " + std::generic_category().message(errno));
    }
    const auto at = reinterpret_cast<std::uintptr_t>(base_);
    data_ = static_cast<std::byte*>(base_) + (kHugePage - at % kHugePage) % kHugePage;
    ::madvise(data_, bytes, MADV_HUGEPAGE);  // a wish
  }
  ~Buffer() { ::munmap(base_, mapped_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::size_t mapped_;
  void* base_ = nullptr;
  std::byte* data_ = nullptr;
};

std::size_t checked(std::size_t bytes, int n_threads) {
  if (bytes == 0 || bytes > std::numeric_limits<std::size_t>::max() / 4) {
    throw InvalidArgument("cannot read " + std::to_string(bytes) + " bytes; give the size of a model");
  }
  if (n_threads < 1) throw InvalidArgument("cannot read with " + std::to_string(n_threads) + " threads");
  return (bytes + kReadUnit - 1) / kReadUnit * kReadUnit;
}

}  // namespace

struct MemoryReader::Parts {
  Parts(std::size_t n, int n_threads) : bytes(n), buffer(n), team(n_threads) {
    auto* words = reinterpret_cast<std::uint64_t*>(buffer.data());
    team.run([&](int thread) {  // each its own share, which is then near its core
      const Share s = share(static_cast<std::int64_t>(bytes / 8), thread, team.size());
      for (std::int64_t i = s.begin; i < s.end; ++i) words[i] = word(static_cast<std::uint64_t>(i));
    });
    double least = std::numeric_limits<double>::infinity();
    for (const ReadPattern tried : patterns()) {
      const std::vector<double> took = read(tried, 3, 1);
      if (const double t = *std::min_element(took.begin(), took.end()); t < least) least = t, fastest = tried;
    }
  }

  std::vector<double> read(ReadPattern pattern, int passes, int n_parts) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds(static_cast<std::size_t>(passes));
    const auto units = static_cast<std::int64_t>(bytes / kReadUnit);
    std::atomic<std::uint64_t> last{0};
    team.run([&](int thread) {
      std::uint64_t mine = 0;
      for (double& took : seconds) {
        const Clock::time_point began = Clock::now();
        mine = 0;
        for (int i = 0; i < n_parts; ++i) {
          const Share part = share(units, i, n_parts);
          const Share s = share(part.end - part.begin, thread, team.size());
          const std::byte* from = buffer.data() + static_cast<std::size_t>(part.begin + s.begin) * kReadUnit;
          mine += pattern(from, static_cast<std::size_t>(s.end - s.begin));
          team.barrier();
        }
        if (thread == 0) took = std::chrono::duration<double>(Clock::now() - began).count();
      }
      last += mine;
    });
    sum = last.load();
    return seconds;
  }

  std::size_t bytes;
  Buffer buffer;
  Team team;
  ReadPattern fastest = nullptr;
  std::atomic<std::uint64_t> sum = 0;
  const ::pid_t owner = ::getpid();
};

MemoryReader::MemoryReader(std::size_t bytes, int n_threads)
    : parts_(std::make_unique<Parts>(checked(bytes, n_threads), n_threads)) {}
MemoryReader::~MemoryReader() = default;

std::size_t MemoryReader::bytes() const { return parts_->bytes; }
int MemoryReader::n_threads() const { return parts_->team.size(); }
std::uint64_t MemoryReader::sum() const { return parts_->sum; }

std::vector<double> MemoryReader::read(int passes, int parts) {
  if (passes < 1 || parts < 1) {
    throw InvalidArgument("cannot read " + std::to_string(passes) + " times in " + std::to_string(parts) +
                          " parts; both must be at least 1");
  }
  if (::getpid() != parts_->owner) {
    throw StateError("the reader's threads did not follow into this process, made by fork(): make one here");
  }
  return parts_->read(parts_->fastest, passes, parts);
}

}  // namespace ringlm::cpu

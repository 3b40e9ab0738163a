#include "host/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include "host/cgroup.h"
#include "ringlm/error.h"

namespace ringlm::host {
namespace {

std::atomic<std::size_t> mapped{0};

std::optional<std::uint64_t> mem_available() {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  std::uint64_t kib = 0;
  while (in >> key >> kib) {
    std::getline(in, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return std::nullopt;
}

void touch(volatile std::byte* p, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < bytes; at += page) p[at] = std::byte{0};
}

}  // namespace

std::size_t available_memory() {
  std::uint64_t n = std::numeric_limits<std::size_t>::max();
  if (const auto machine = mem_available()) n = std::min(n, *machine);
  if (const auto group = cgroup_memory()) n = std::min(n, *group);
  return static_cast<std::size_t>(n);
}

std::string format_bytes(std::size_t n) {
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  if (n < 1024) return std::to_string(n) + " bytes";
  double x = static_cast<double>(n) / 1024.0;
  std::size_t unit = 0;
  while (x >= 1024.0 && unit < 3) x /= 1024.0, ++unit;
  char text[32];
  std::snprintf(text, sizeof text, "%.*f %s", x < 10 ? 2 : x < 100 ? 1 : 0, x, units[unit]);
  return text;
}

std::size_t mapped_bytes() { return mapped; }

void drop_pages(std::span<const std::byte> bytes) noexcept {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data());
  const std::uintptr_t first = (begin + page - 1) / page * page, last = (begin + bytes.size()) / page * page;
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

Region::Region(std::size_t bytes, const std::string& what, Pages pages) {
  if (bytes == 0) return;
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    throw OutOfMemory("the system refuses " + format_bytes(bytes) + " for " + what + ": " +
                      std::generic_category().message(errno));
  }
  ::madvise(p, bytes, MADV_HUGEPAGE);  // fewer pages to look up: a plane is read front to back in every step
  if (pages == Pages::Present) touch(static_cast<volatile std::byte*>(p), bytes);
  bytes_ = {static_cast<std::byte*>(p), bytes};
  mapped += bytes;
}

Region::~Region() {
  if (bytes_.empty()) return;
  ::munmap(bytes_.data(), bytes_.size());
  mapped -= bytes_.size();
}

Region::Region(Region&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace ringlm::host

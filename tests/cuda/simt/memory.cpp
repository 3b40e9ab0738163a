#include "simt/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

#include "simt/machine.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace simt {

namespace {

constexpr std::size_t kAlign = 256;   // of device memory
constexpr std::size_t kGuard = 1024;  // before and behind a buffer
constexpr unsigned char kGuardByte = 0xa5;
constexpr std::size_t kArena = 2 * SharedMemory::kLargest;  // with gaps
constexpr std::size_t kGap = 64;                            // between shared arrays

// Per byte of shared memory.
constexpr std::uint8_t kFree = 0, kInArray = 1, kCopying = 2;

void forbid([[maybe_unused]] const void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(memory, bytes);
#endif
}

void allow([[maybe_unused]] const void* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#endif
}

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

// ---- global

bool Allocation::has(const void* address, int n) const {
  const std::uintptr_t offset = number(address) - number(base);
  return offset < bytes && bytes - offset >= static_cast<std::size_t>(n);
}

void* GlobalMemory::allocate(std::size_t bytes, std::string name) {
  Allocation a;
  const std::size_t total = kGuard + kAlign + bytes + kGuard;
  a.storage.reset(new std::byte[total]);
  std::memset(a.storage.get(), kGuardByte, total);
  a.base = a.storage.get() + kGuard;
  a.base += (kAlign - number(a.base) % kAlign) % kAlign;
  a.bytes = bytes;
  a.name = name;
  a.count = {std::move(name), bytes};
  a.touched.resize(bytes);
  a.cells = make_cells(bytes);
  std::memset(a.base, kPoison, bytes);
  forbid(a.storage.get(), static_cast<std::size_t>(a.base - a.storage.get()));
  forbid(a.base + bytes, static_cast<std::size_t>(a.storage.get() + total - (a.base + bytes)));
  std::byte* base = a.base;
  by_base_.emplace(number(base), std::move(a));
  return base;
}

void GlobalMemory::release(void* memory) {
  const auto found = by_base_.find(number(memory));
  if (found == by_base_.end()) throw Fault("device_free of what is no device memory", "", "", 0, {}, {});
  Allocation a = std::move(found->second);
  by_base_.erase(found);
  last_ = nullptr;
  allow(a.storage.get(), kGuard + kAlign + a.bytes + kGuard);
}

Allocation* GlobalMemory::find(const void* address) {
  const std::uintptr_t at = number(address);
  const auto near = [at](const Allocation& a) {
    return at + kGuard >= number(a.base) && at < number(a.base) + a.bytes + kGuard;
  };
  if (last_ != nullptr && last_->has(address, 1)) return last_;
  auto next = by_base_.upper_bound(at);
  if (next != by_base_.begin() && near(std::prev(next)->second)) return last_ = &std::prev(next)->second;
  if (next != by_base_.end() && near(next->second)) return last_ = &next->second;
  return nullptr;
}

// AddressSanitizer guards the guards itself.
void GlobalMemory::check_guards() {
#if !defined(__SANITIZE_ADDRESS__)
  const auto check = [](std::byte* from) {
    std::byte* const end = from + kGuard;
    std::byte* hit = std::find_if(from, end, [](std::byte b) { return b != std::byte{kGuardByte}; });
    if (hit == end) return;
    const std::string where = name_of(hit).c_str();
    std::memset(from, kGuardByte, kGuard);  // told once
    const Launch& launch = *machine().launch;
    throw Fault("a plain store wrote to " + where + " [kernel " + launch.kernel + ", after the launch]",
                launch.kernel, "", 0, {}, {});
  };
  for (auto& [base, a] : by_base_) {
    check(a.base - kGuard);
    check(a.base + a.bytes);
  }
#endif
}

// ---- shared

SharedMemory::SharedMemory() : cells(make_cells(kArena)), state_(kArena) {
  void* memory = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<std::byte*>(memory);
  std::memset(arena_, kPoison, kArena);
  forbid(arena_, kArena);
}

void SharedMemory::begin_block(std::size_t dynamic_bytes, std::size_t limit) {
  const std::size_t used = std::min(kArena, top_ + kGap);
  allow(arena_, used);
  std::memset(arena_, kPoison, used);
  forbid(arena_, used);
  std::fill(state_.begin(), state_.begin() + static_cast<std::ptrdiff_t>(used), kFree);
  arrays_.clear();
  top_ = used_ = 0;
  limit_ = limit;
  carve(nullptr, "(dynamic)", dynamic_bytes, 128);
}

std::byte* SharedMemory::carve(const void* tag, const char* name, std::size_t bytes, std::size_t align) {
  used_ = (used_ + align - 1) / align * align + bytes;
  const std::size_t begin = (top_ + kGap + align - 1) / align * align;
  allow(arena_ + begin, bytes);
  std::fill_n(state_.begin() + static_cast<std::ptrdiff_t>(begin), bytes, kInArray);
  top_ = begin + bytes;
  arrays_.push_back({tag, name, begin, bytes});
  return arena_ + begin;
}

std::byte* SharedMemory::dynamic(const char* name) {
  arrays_[0].name = name;
  return arena_ + arrays_[0].begin;
}

std::byte* SharedMemory::array(const void* tag, const char* name, std::size_t bytes, std::size_t align,
                               const Place& place) {
  for (const Array& a : arrays_) {
    if (a.tag == tag) return arena_ + a.begin;
  }
  if (used_ + bytes > limit_ || top_ + bytes + 2 * kGap + align > kArena) {
    fail(*machine().current, place, "%zu bytes of shared memory with array %s, the limit is %zu",
         used_ + bytes, name, limit_);
  }
  return carve(tag, name, bytes, align);
}

bool SharedMemory::holds(const void* address) const { return number(address) - number(arena_) < kArena; }
std::size_t SharedMemory::offset(const void* address) const { return number(address) - number(arena_); }

Text SharedMemory::name_of(const void* address) const {
  const std::size_t at = offset(address);
  const Array* nearest = &arrays_[0];
  for (const Array& a : arrays_) {
    if (a.begin < at + kGap / 2) nearest = &a;
  }
  Text text;
  std::snprintf(text.chars, sizeof text.chars, "byte %td of shared array %s (%zu bytes)",
                static_cast<std::ptrdiff_t>(at) - static_cast<std::ptrdiff_t>(nearest->begin),
                nearest->name.c_str(), nearest->bytes);
  return text;
}

void SharedMemory::check(const Thread& thread, const Place& place, const char* what, const void* address,
                         int bytes) {
  if (number(address) % static_cast<std::uintptr_t>(bytes) != 0) {
    fail(thread, place, "misaligned: %s of %d bytes at %s", what, bytes, name_of(address).c_str());
  }
  for (int i = 0; i < bytes; ++i) {
    const auto* byte = static_cast<const std::byte*>(address) + i;
    const std::uint8_t state = holds(byte) ? state_[offset(byte)] : kFree;
    if (state == kInArray) continue;
    if (state == kFree) {
      fail(thread, place, "out of bounds: %s of %d bytes at %s", what, bytes, simt::name_of(byte).c_str());
    }
    fail(thread, place, "%s of %d bytes at %s, into which cp.async is copying", what, bytes,
         name_of(byte).c_str());
  }
}

void SharedMemory::set_in_flight(const void* address, int bytes, bool in_flight) {
  std::fill_n(state_.begin() + static_cast<std::ptrdiff_t>(offset(address)), bytes,
              in_flight ? kCopying : kInArray);
}

Text name_of(const void* address) {
  Machine& m = machine();
  if (m.shared.holds(address)) return m.shared.name_of(address);
  Text text{"an address that is in no buffer"};
  const Allocation* a = m.global.find(address);
  if (a == nullptr) return text;
  std::snprintf(text.chars, sizeof text.chars, "byte %td of buffer %s (%zu bytes)",
                static_cast<const std::byte*>(address) - a->base, a->name.c_str(), a->bytes);
  return text;
}

// ---- accesses of the current thread

namespace {

Allocation& check_global(const Thread& t, const Place& place, const char* what, const void* address,
                         int bytes) {
  if (number(address) % static_cast<std::uintptr_t>(bytes) != 0) {
    fail(t, place, "misaligned: global %s of %d bytes at %s", what, bytes, name_of(address).c_str());
  }
  Allocation* a = machine().global.find(address);
  if (a == nullptr || !a->has(address, bytes)) {
    fail(t, place, "out of bounds: global %s of %d bytes at %s", what, bytes, name_of(address).c_str());
  }
  return *a;
}

void touch_global(const Place& place, const void* address, int bytes, Op op) {
  Machine& m = machine();
  const Thread& t = *m.current;
  const char* const what = op == Op::kGlobalLoad ? "load" : op == Op::kGlobalStore ? "store" : "atomic";
  Allocation& a = check_global(t, place, what, address, bytes);
  const auto offset = number(address) - number(a.base);
  if (kRaceBuild) {
    const Touch touch = op == Op::kGlobalLoad    ? Touch::kRead
                        : op == Op::kGlobalStore ? Touch::kWrite
                                                 : Touch::kAtomic;
    m.races.access(t, &a.cells[offset], address, bytes, touch, false, place);
  }
  if (!m.options.count) return;
  const auto n = static_cast<std::uint64_t>(bytes);
  const int kinds = op == Op::kGlobalLoad ? 1 : op == Op::kGlobalStore ? 2 : 3;
  if (kinds & 1) a.count.bytes_read += n;
  if (kinds & 2) a.count.bytes_written += n;
  for (std::size_t i = offset; i < offset + n; ++i) {
    const int fresh = kinds & ~a.touched[i];
    a.count.unique_read += fresh & 1;
    a.count.unique_written += fresh >> 1 & 1;
    a.touched[i] |= static_cast<std::uint8_t>(kinds);
  }
  m.counters.add(t.warp, t.lane, op, place, address, bytes);
}

void touch_shared(const Place& place, const void* address, int bytes, Op op, Touch touch) {
  Machine& m = machine();
  const Thread& t = *m.current;
  m.shared.check(t, place, op == Op::kSharedLoad ? "shared load" : "shared store", address, bytes);
  if (kRaceBuild) {
    m.races.access(t, &m.shared.cells[m.shared.offset(address)], address, bytes, touch, true, place);
  }
  if (m.options.count) m.counters.add(t.warp, t.lane, op, place, address, bytes);
}

}  // namespace

void load_global(void* to, const void* from, int bytes, Site at) {
  touch_global(at, from, bytes, Op::kGlobalLoad);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void store_global(void* to, const void* from, int bytes, Site at) {
  touch_global(at, to, bytes, Op::kGlobalStore);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void load_shared(void* to, const void* from, int bytes, Site at) {
  touch_shared(at, from, bytes, Op::kSharedLoad, Touch::kRead);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void store_shared(void* to, const void* from, int bytes, Site at) {
  touch_shared(at, to, bytes, Op::kSharedStore, Touch::kWrite);
  std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

void atomic_load(void* value, const void* from, int bytes, Site at) {
  Machine& m = machine();
  if (m.shared.holds(from)) {
    touch_shared(at, from, bytes, Op::kSharedLoad, Touch::kAtomic);
  } else {
    touch_global(at, from, bytes, Op::kGlobalAtomic);
    if (kRaceBuild) m.races.atomic(*m.current, from);
  }
  std::memcpy(value, from, static_cast<std::size_t>(bytes));
}

void atomic_store(void* to, const void* value, int bytes) {
  std::memcpy(to, value, static_cast<std::size_t>(bytes));
}

void copy_async(void* to, const void* from, int bytes, Site at) {
  Machine& m = machine();
  if (!m.shared.holds(to)) fail(*m.current, at, "cp.async to %s: not shared memory", name_of(to).c_str());
  touch_global(at, from, bytes, Op::kGlobalLoad);
  touch_shared(at, to, bytes, Op::kSharedStore, Touch::kWrite);
  m.shared.set_in_flight(to, bytes, true);
  if (m.current->groups.empty()) m.current->groups.emplace_back();
  m.current->groups.back().push_back({to, from, bytes, at});
}

void copy_async_commit() {
  auto& groups = machine().current->groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

void copy_async_wait(int in_flight) {
  Machine& m = machine();
  auto& groups = m.current->groups;  // the last one is open
  while (static_cast<int>(groups.size()) > in_flight + 1) {
    for (const Copy& copy : groups.front()) {
      m.shared.set_in_flight(copy.to, copy.bytes, false);
      if (kRaceBuild) {
        m.races.access(*m.current, &m.shared.cells[m.shared.offset(copy.to)], copy.to, copy.bytes,
                       Touch::kWrite, true, copy.place);
      }
      std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
    }
    groups.erase(groups.begin());
  }
}

void* dynamic_shared(const char* name) { return machine().shared.dynamic(name); }

void* static_shared(const void* tag, const char* name, std::size_t bytes, std::size_t align, Site at) {
  return machine().shared.array(tag, name, bytes, align, at);
}

void* device_alloc(std::size_t bytes, std::string name) {
  return machine().global.allocate(bytes, std::move(name));
}

void device_free(void* memory) { machine().global.release(memory); }

}  // namespace simt

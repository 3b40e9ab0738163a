#include "simt/races.h"

#include <algorithm>
#include <cstring>

#include "simt/machine.h"

namespace simt {

void Races::begin_launch() {
  launch_begin_ = ++clock_;
  block_begins_.clear();
  releases_.clear();
}

void Races::begin_block(int n_threads) {
  block_begin_ = barrier_ = fenced_before_ = ++clock_;
  block_begins_.push_back(block_begin_);
  warp_barriers_.assign(static_cast<std::size_t>((n_threads + kWarp - 1) / kWarp), block_begin_);
  fences_.assign(static_cast<std::size_t>(n_threads), {});
  acquires_.clear();
}

void Races::barrier() {
  barrier_ = ++clock_;
  if (std::none_of(fences_.begin(), fences_.end(), [](const Fences& f) { return f.unfenced; })) {
    fenced_before_ = barrier_;
  }
}

void Races::warp_barrier(int warp) { warp_barriers_[static_cast<std::size_t>(warp)] = ++clock_; }

void Races::fence(const Thread& thread) {
  Fences& f = fences_[static_cast<std::size_t>(thread.linear)];
  f.clock = ++clock_;
  f.unfenced = false;
  for (const std::uintptr_t address : f.atomics) acquires_.push_back({address, thread.linear, clock_});
  f.atomics.clear();
}

// A fence releases what the thread has seen: its own accesses, and those that barriers put before it.
void Races::atomic(const Thread& thread, const void* address) {
  Fences& f = fences_[static_cast<std::size_t>(thread.linear)];
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::uint32_t warp_barrier = warp_barriers_[static_cast<std::size_t>(thread.warp)];
  const std::uint32_t now = ++clock_;
  Release release{block_begin_, thread.linear, fenced_before_, 0, 0};
  if (!f.unfenced) {
    release.self = now;
    if (f.clock >= barrier_) release.block = barrier_;
    if (f.clock >= warp_barrier) release.warp = warp_barrier;
  }
  releases_[at].push_back(release);
  if (std::find(f.atomics.begin(), f.atomics.end(), at) == f.atomics.end()) f.atomics.push_back(at);
}

bool Races::ordered(const Access& before, const Thread& thread) const {
  if (before.clock < launch_begin_) return true;  // or none
  if (before.clock < block_begin_) return acquired(before, thread);
  if (before.linear() == thread.linear || before.clock < barrier_) return true;
  return before.linear() / kWarp == thread.warp &&
         before.clock < warp_barriers_[static_cast<std::size_t>(thread.warp)];
}

bool Races::acquired(const Access& before, const Thread& thread) const {
  const std::uint32_t block =
      *std::prev(std::upper_bound(block_begins_.begin(), block_begins_.end(), before.clock));
  const auto releases = [&](const Release& r) {
    return r.block_begin == block &&
           (before.clock < r.block || (before.linear() == r.thread && before.clock < r.self) ||
            (before.linear() / kWarp == r.thread / kWarp && before.clock < r.warp));
  };
  const std::uint32_t warp_barrier = warp_barriers_[static_cast<std::size_t>(thread.warp)];
  for (const Acquire& a : acquires_) {
    const bool passed_on = a.thread == thread.linear || a.clock < barrier_ ||
                           (a.thread / kWarp == thread.warp && a.clock < warp_barrier);
    if (!passed_on) continue;
    const std::vector<Release>& all = releases_.at(a.address);  // ordered by block
    auto next = std::lower_bound(all.begin(), all.end(), block,
                                 [](const Release& r, std::uint32_t begin) { return r.block_begin < begin; });
    for (; next != all.end() && next->block_begin == block; ++next) {
      if (releases(*next)) return true;
    }
  }
  return false;
}

void Races::report(const Access& before, bool before_wrote, const Thread& thread, Touch touch, int bytes,
                   const void* address, const Place& place) const {
  const char* const now = touch == Touch::kRead ? "read" : touch == Touch::kWrite ? "write" : "atomic";
  const char* const then = before.atomic() ? "atomic" : before_wrote ? "write" : "read";
  const bool same_block = before.clock >= block_begin_;
  fail(thread, place, "race: %s of %d bytes at %s, after the %s at %s by thread %d of %s, with no %s between",
       now, bytes, name_of(address).c_str(), then, name_of(places_[before.place]).c_str(), before.linear(),
       same_block ? "this block" : "another block", same_block ? "barrier" : "fence, atomic and fence");
}

void Races::access(const Thread& thread, Cell* cells, const void* address, int bytes, Touch touch,
                   bool shared, const Place& place) {
  const auto self = static_cast<std::uint16_t>(thread.linear);
  Access now{clock_, place_index(place), self};
  if (touch == Touch::kAtomic) now.thread |= Access::kAtomic;
  if (!shared && touch == Touch::kWrite) fences_[self].unfenced = true;
  for (int i = 0; i < bytes; ++i) {
    Cell& cell = cells[i];
    const void* const byte = static_cast<const std::byte*>(address) + i;
    if (shared && cell.write.clock < block_begin_) {
      if (touch != Touch::kWrite) {
        fail(thread, place, "uninitialised: read of %d bytes at %s, which this block has not written", bytes,
             name_of(byte).c_str());
      }
      if (cell.read.clock < block_begin_) cell = {};  // an earlier block's
    }
    if (!ordered(cell.write, thread) && !(cell.write.atomic() && touch == Touch::kAtomic)) {
      report(cell.write, true, thread, touch, bytes, byte, place);
    }
    if (touch == Touch::kRead) {
      const bool drop_read =
          cell.read.linear() == thread.linear ||
          (cell.other_read.clock >= barrier_ && cell.other_read.linear() / kWarp != thread.warp &&
           cell.read.linear() / kWarp == thread.warp);
      if (!drop_read) cell.other_read = cell.read;
      cell.read = now;
      continue;
    }
    for (const Access& read : {cell.read, cell.other_read}) {
      if (!ordered(read, thread)) report(read, false, thread, touch, bytes, byte, place);
    }
    cell.write = now;
  }
}

std::uint16_t Races::place_index(const Place& place) {
  const auto [found, fresh] = place_indexes_.try_emplace(place, static_cast<std::uint16_t>(places_.size()));
  if (fresh) places_.push_back(place);
  return found->second;
}

void Races::bypass(const Place& place) { ++bypasses_[place]; }

void Races::list_bypasses(Report& report) const {
  for (const auto& [place, count] : bypasses_) {
    report.bypasses += count;
    report.bypass_lines.push_back(name_of(place).c_str());
  }
  std::vector<std::string>& lines = report.bypass_lines;  // one may have several instructions
  std::sort(lines.begin(), lines.end());
  lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
}

#if defined(SIMT_RACES)
namespace {

// Every plain access of the code compiled with -fsanitize=thread.
void plain_access(const void* address, std::size_t n, Touch touch, const void* return_address) {
  Machine& m = machine();
  if (m.current == nullptr || m.current->fiber.holds(address)) return;
  const Thread& t = *m.current;
  const Place place(return_address);
  const int bytes = static_cast<int>(n);
  if (m.shared.holds(address)) {
    // Alignment is the compiler's business here: it may merge or split accesses.
    for (int i = 0; i < bytes; ++i) {
      m.shared.check(t, place, touch == Touch::kRead ? "read" : "write",
                     static_cast<const std::byte*>(address) + i, 1);
    }
    m.races.access(t, &m.shared.cells[m.shared.offset(address)], address, bytes, touch, true, place);
    return;
  }
  Allocation* a = m.global.find(address);
  if (a == nullptr) return;  // the host's
  if (!a->has(address, bytes)) {
    fail(t, place, "out of bounds: plain global %s of %d bytes at %s",
         touch == Touch::kRead ? "read" : "write", bytes, name_of(address).c_str());
  }
  m.races.bypass(place);
  const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(address) - a->base);
  m.races.access(t, &a->cells[offset], address, bytes, touch, false, place);
}

}  // namespace
#endif

}  // namespace simt

// What -fsanitize=thread calls; libtsan, which has these names too, is not linked.
#if defined(SIMT_RACES)
extern "C" {
void __tsan_init();
void __tsan_func_entry(void*);
void __tsan_func_exit();
void __tsan_vptr_read(void**);
void __tsan_vptr_update(void**, void*);
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
#define SIMT_TSAN(name, bytes, touch)                                                    \
  void name(void* address);                                                              \
  void name(void* address) {                                                             \
    simt::plain_access(address, bytes, simt::Touch::touch, __builtin_return_address(0)); \
  }
SIMT_TSAN(__tsan_read1, 1, kRead)
SIMT_TSAN(__tsan_read2, 2, kRead)
SIMT_TSAN(__tsan_read4, 4, kRead)
SIMT_TSAN(__tsan_read8, 8, kRead)
SIMT_TSAN(__tsan_read16, 16, kRead)
SIMT_TSAN(__tsan_unaligned_read2, 2, kRead)
SIMT_TSAN(__tsan_unaligned_read4, 4, kRead)
SIMT_TSAN(__tsan_unaligned_read8, 8, kRead)
SIMT_TSAN(__tsan_unaligned_read16, 16, kRead)
SIMT_TSAN(__tsan_write1, 1, kWrite)
SIMT_TSAN(__tsan_write2, 2, kWrite)
SIMT_TSAN(__tsan_write4, 4, kWrite)
SIMT_TSAN(__tsan_write8, 8, kWrite)
SIMT_TSAN(__tsan_write16, 16, kWrite)
SIMT_TSAN(__tsan_unaligned_write2, 2, kWrite)
SIMT_TSAN(__tsan_unaligned_write4, 4, kWrite)
SIMT_TSAN(__tsan_unaligned_write8, 8, kWrite)
SIMT_TSAN(__tsan_unaligned_write16, 16, kWrite)
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_read_range(void* address, unsigned long bytes) {
  simt::plain_access(address, bytes, simt::Touch::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes) {
  simt::plain_access(address, bytes, simt::Touch::kWrite, __builtin_return_address(0));
}
// The guards of static locals of host code.
unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int);
unsigned char __tsan_atomic8_load(const volatile unsigned char* p, int) {
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
// And its shared pointers.
int __tsan_atomic32_fetch_add(volatile int* p, int value, int);
int __tsan_atomic32_fetch_add(volatile int* p, int value, int) {
  return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}
}
#endif

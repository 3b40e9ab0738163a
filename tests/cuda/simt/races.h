// Race build: who touched each byte last, and which of these accesses a barrier or a fence puts in order.
//
// A clock ticks at every barrier, __syncwarp, fence and atomic. An access is before another one of its block
// if a barrier of the block, or a __syncwarp of the common warp, ticked between them. It is before one of
// another block if its block released it and the other acquired: fence, atomic, and atomic, fence on the same
// address; the barriers on either side pass that on to the other threads of the blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "simt/place.h"
#include "simt/simt.h"

namespace simt {

struct Thread;

struct Access {
  std::uint32_t clock = 0;   // 0: none
  std::uint16_t place = 0;   // in Races' table
  std::uint16_t thread = 0;  // linear, and kAtomic
  static constexpr std::uint16_t kAtomic = 0x8000;
  bool atomic() const { return (thread & kAtomic) != 0; }
  int linear() const { return thread & ~kAtomic; }
};

// `read` is the last one; `other_read` is of another thread, of another warp where there was one.
struct Cell {
  Access write, read, other_read;
};

// One for each byte of some memory, at first all zero; most are never touched, so calloc.
using Cells = std::unique_ptr<Cell[], decltype(&std::free)>;
inline Cells make_cells(std::size_t n) {
  return {kRaceBuild ? static_cast<Cell*>(std::calloc(n, sizeof(Cell))) : nullptr, &std::free};
}

enum class Touch { kRead, kWrite, kAtomic };

class Races {
 public:
  void begin_launch();
  void begin_block(int n_threads);
  void barrier();
  void warp_barrier(int warp);
  void fence(const Thread& thread);
  void atomic(const Thread& thread, const void* address);  // behind its access
  // `cells` are those of the bytes from `address` on.
  void access(const Thread& thread, Cell* cells, const void* address, int bytes, Touch touch, bool shared,
              const Place& place);

  void bypass(const Place& place);
  void reset_bypasses() { bypasses_.clear(); }
  void list_bypasses(Report& report) const;

 private:
  struct Release {
    std::uint32_t block_begin;  // the first clock of the releasing block
    int thread;
    // Released are the accesses before these clocks of: the block, the thread's warp, the thread.
    std::uint32_t block, warp, self;
  };
  struct Acquire {
    std::uintptr_t address;
    int thread;
    std::uint32_t clock;
  };
  struct Fences {                         // of a thread
    std::uint32_t clock = 0;              // of the last fence
    bool unfenced = false;                // it has written to global memory since
    std::vector<std::uintptr_t> atomics;  // addresses since
  };
  bool ordered(const Access& before, const Thread& thread) const;
  bool acquired(const Access& before, const Thread& thread) const;  // of another block
  [[noreturn]] void report(const Access& before, bool before_wrote, const Thread& thread, Touch touch,
                           int bytes, const void* address, const Place& place) const;
  std::uint16_t place_index(const Place& place);

  std::uint32_t clock_ = 1, launch_begin_ = 1, block_begin_ = 1, barrier_ = 1;
  std::uint32_t fenced_before_ = 1;  // writes of this block before this clock were fenced by their threads
  std::vector<std::uint32_t> warp_barriers_;
  std::vector<std::uint32_t> block_begins_;  // of this launch, ascending
  std::vector<Fences> fences_;
  std::map<std::uintptr_t, std::vector<Release>> releases_;  // by address, of this launch
  std::vector<Acquire> acquires_;                            // of this block
  std::vector<Place> places_;
  std::unordered_map<Place, std::uint16_t, PlaceHash> place_indexes_;
  std::unordered_map<Place, std::uint64_t, PlaceHash> bypasses_;
};

}  // namespace simt

// The running launch: its threads, warps and block, and the parts that watch it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "simt/counters.h"
#include "simt/fiber.h"
#include "simt/memory.h"
#include "simt/place.h"
#include "simt/races.h"
#include "simt/simt.h"

namespace simt {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;

enum class State { kReady, kInCollective, kAtBarrier, kExited };

// What a lane brings to a collective. Lanes may meet when kind, mask and source line agree.
enum class Kind { kShuffle, kBallot, kSyncWarp, kMma, kMovMatrix, kLdMatrix };
struct Collective {
  Kind kind;
  std::uint32_t mask;
  Place place;
  bool meets(const Collective& other) const {
    return kind == other.kind && mask == other.mask && place == other.place;
  }
  void* argument;                                                // of the kind's own type
  void (*combine)(void* const* arguments, std::uint32_t lanes);  // arguments by lane; fills in the results
};

struct Copy {
  void* to;
  const void* from;
  int bytes;
  Place place;
};

struct Thread {
  dim3 index;
  int linear, lane, warp;
  State state;
  Collective collective;  // while kInCollective
  Barrier barrier;        // while kAtBarrier
  Place barrier_place;
  bool predicate;
  int barrier_result;
  std::vector<std::vector<Copy>> groups;  // of cp.async, the last one not yet committed
  Fiber fiber;
};

struct Warp {
  std::uint32_t live, waiting;  // lanes that have not exited; lanes in a collective
  bool mixed;                   // the waiting lanes are not all in the same one
};

struct Machine {
  Options options;
  // The launch, its threads in order. Fibers outlive launches.
  const Launch* launch = nullptr;
  std::vector<std::unique_ptr<Thread>> threads;
  int n_threads = 0;
  std::vector<Warp> warps;
  Thread* current = nullptr;  // null while the scheduler runs
  std::optional<Fault> fault;
  std::uint64_t n_blocks = 0, n_switches = 0, n_collectives = 0, n_barriers = 0;

  GlobalMemory global;
  SharedMemory shared;
  Counters counters;
  Races races;

  Thread& thread(int warp, int lane) { return *threads[static_cast<std::size_t>(warp * kWarp + lane)]; }
};
inline Machine& machine() {
  static Machine the_machine;
  return the_machine;
}

// Ends the launch: never returns to the thread, which may be another than the one that runs.
[[noreturn, gnu::format(printf, 3, 4)]] void fail(const Thread& thread, const Place& place,
                                                  const char* format, ...);
// "[kernel reduce, block (0, 0, 0), thread (31, 0, 0)]"
std::string context_of(const Thread& thread);

// collectives.cpp. When all live lanes of the mask wait, their results are filled in and they are ready.
bool complete_collective(int warp, std::uint32_t mask);

}  // namespace simt

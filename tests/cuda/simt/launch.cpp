// The scheduler: runs the blocks of a launch one after another, each thread until it waits for others.
#include <algorithm>
#include <numeric>
#include <random>

#include "simt/machine.h"

namespace simt {

uint3 thread_index, block_index;
dim3 block_size, grid_size;

Options& options() { return machine().options; }

namespace {

void run_thread() {
  Machine& m = machine();
  Thread& t = *m.current;
  m.launch->body();
  const auto not_waited_for = [](const std::vector<Copy>& group) { return !group.empty(); };
  if (std::any_of(t.groups.begin(), t.groups.end(), not_waited_for)) {
    fail(t, {}, "the thread exits with a cp.async that it has not waited for");
  }
  t.state = State::kExited;
}

void resume(Thread& t) {
  Machine& m = machine();
  ++m.n_switches;
  m.current = &t;
  thread_index = {t.index.x, t.index.y, t.index.z};
  t.fiber.resume();
  m.current = nullptr;
  if (m.fault) {
    const Fault fault = *std::exchange(m.fault, {});
    throw fault;
  }
}

std::vector<int> in_order(int n, std::mt19937& random) {
  std::vector<int> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  switch (options().order) {
    case Order::kForward:
      break;
    case Order::kBackward:
      std::reverse(order.begin(), order.end());
      break;
    case Order::kRandom:
      std::shuffle(order.begin(), order.end(), random);
      break;
  }
  return order;
}

std::size_t shared_limit(const Launch& launch) {
  return std::max(machine().options.shared_limit, launch.shared_limit);
}

void prepare_block(std::size_t index) {
  Machine& m = machine();
  const Launch& launch = *m.launch;
  const std::size_t x = launch.grid.x, y = launch.grid.y;
  block_index = {static_cast<unsigned>(index % x), static_cast<unsigned>(index / x % y),
                 static_cast<unsigned>(index / (x * y))};
  m.races.begin_block(m.n_threads);
  m.warps.assign(static_cast<std::size_t>((m.n_threads + kWarp - 1) / kWarp), {});
  for (int i = 0; i < m.n_threads; ++i) {
    Thread& t = *m.threads[static_cast<std::size_t>(i)];
    const unsigned n = static_cast<unsigned>(i), bx = launch.block.x, by = launch.block.y;
    t.index = {n % bx, n / bx % by, n / (bx * by)};
    t.linear = i;
    t.lane = i % kWarp;
    t.warp = i / kWarp;
    t.state = State::kReady;
    t.groups.clear();
    t.fiber.prepare(run_thread);
    m.warps[static_cast<std::size_t>(t.warp)].live |= 1u << t.lane;
  }
  m.shared.begin_block(launch.shared_bytes, shared_limit(launch));
}

// Lets each thread of a warp that can run go on until it waits or has exited. False when none could.
bool run_warp_once(int warp, std::mt19937& random) {
  Machine& m = machine();
  Warp& w = m.warps[static_cast<std::size_t>(warp)];
  const int n_lanes = std::min(kWarp, m.n_threads - warp * kWarp);
  bool ran = false;
  for (const int lane : in_order(n_lanes, random)) {
    Thread& t = m.thread(warp, lane);
    if (t.state != State::kReady) continue;
    resume(t);
    ran = true;
    if (t.state != State::kExited) continue;
    w.live &= ~(1u << lane);  // others may have waited for nobody else
    for (std::uint32_t rest = w.waiting; rest != 0; rest &= rest - 1) {
      if ((w.waiting >> __builtin_ctz(rest) & 1) == 0) continue;
      complete_collective(warp, m.thread(warp, __builtin_ctz(rest)).collective.mask);
    }
  }
  return ran;
}

// In random order, warps take turns; else each runs as far as it can before the next one starts.
bool run_warp(int warp, std::mt19937& random) {
  bool ran = run_warp_once(warp, random);
  if (machine().options.order == Order::kRandom) return ran;
  while (ran && run_warp_once(warp, random)) {
  }
  return ran;
}

// No thread can run: the barrier opens when all threads are at the same one.
void open_barrier() {
  Machine& m = machine();
  const auto begin = m.threads.begin(), end = begin + m.n_threads;
  const auto in_state = [](State state) { return [state](const auto& t) { return t->state == state; }; };
  const auto at_barrier = std::find_if(begin, end, in_state(State::kAtBarrier));
  const auto in_collective = std::find_if(begin, end, in_state(State::kInCollective));
  if (in_collective != end) {
    const Thread& t = **in_collective;
    const std::uint32_t live = m.warps[static_cast<std::size_t>(t.warp)].live;
    for (std::uint32_t rest = t.collective.mask & live; rest != 0; rest &= rest - 1) {
      const Thread& other = m.thread(t.warp, __builtin_ctz(rest));
      if (other.state == State::kInCollective && other.collective.mask == t.collective.mask) continue;
      const bool barrier = other.state == State::kAtBarrier;
      const Place& place = barrier ? other.barrier_place : other.collective.place;
      fail(t, t.collective.place,
           "divergent collective: lane %d waits with mask %08x for lane %d, which is at %s", t.lane,
           t.collective.mask, other.lane, name_of(place).c_str());
    }
  }
  if (at_barrier == end) fail(**in_collective, (*in_collective)->collective.place, "no thread can go on");
  const Thread& first = **at_barrier;
  int n_true = 0;
  for (auto t = begin; t != end; ++t) {
    if ((*t)->state == State::kExited) {
      fail(first, first.barrier_place, "divergent barrier: thread %d waits here, but thread %d has exited",
           first.linear, (*t)->linear);
    }
    if ((*t)->barrier != first.barrier || (*t)->barrier_place != first.barrier_place) {
      fail(**t, (*t)->barrier_place, "divergent barrier: thread %d waits here, thread %d at %s", (*t)->linear,
           first.linear, name_of(first.barrier_place).c_str());
    }
    n_true += (*t)->predicate ? 1 : 0;
  }
  for (auto t = begin; t != end; ++t) {
    (*t)->barrier_result = first.barrier == Barrier::kCount ? n_true
                           : first.barrier == Barrier::kAnd ? n_true == m.n_threads
                                                            : n_true > 0;
    (*t)->state = State::kReady;
  }
  for (int w = 0; w < static_cast<int>(m.warps.size()); ++w) m.counters.flush(w);
  m.races.barrier();
  ++m.n_barriers;
}

void run_block(std::mt19937& random) {
  Machine& m = machine();
  const int n_warps = static_cast<int>(m.warps.size());
  const auto all_exited = [&] {
    return std::all_of(m.warps.begin(), m.warps.end(), [](const Warp& w) { return w.live == 0; });
  };
  while (!all_exited()) {
    bool ran = false;
    for (const int warp : in_order(n_warps, random)) ran |= run_warp(warp, random);
    if (!ran) open_barrier();
  }
  for (int w = 0; w < n_warps; ++w) m.counters.flush(w);
  ++m.n_blocks;
}

void check_shape(const Launch& launch) {
  const dim3 &g = launch.grid, &b = launch.block;
  const bool grid_fits = g.x > 0 && g.y > 0 && g.z > 0 && g.x < 1u << 31 && g.y < 65536 && g.z < 65536;
  const bool block_fits = b.x > 0 && b.y > 0 && b.z > 0 && b.x <= kMostThreads && b.y <= kMostThreads &&
                          b.z <= 64 && b.x * b.y * b.z <= kMostThreads;
  const auto refuse = [&](const std::string& why) {
    throw Fault(why + " [kernel " + launch.kernel + ", at its launch]", launch.kernel, "", 0, {}, {});
  };
  if (!grid_fits || !block_fits) refuse("no such grid or block");
  const std::size_t limit = std::min(shared_limit(launch), SharedMemory::kLargest);
  if (launch.shared_bytes > limit) {
    refuse(std::to_string(launch.shared_bytes) + " bytes of shared memory, the limit is " +
           std::to_string(limit));
  }
}

}  // namespace

void run(const Launch& launch) {
  Machine& m = machine();
  check_shape(launch);
  m.launch = &launch;
  m.n_threads = static_cast<int>(launch.block.x * launch.block.y * launch.block.z);
  while (static_cast<int>(m.threads.size()) < m.n_threads) m.threads.push_back(std::make_unique<Thread>());
  block_size = launch.block;
  grid_size = launch.grid;
  m.races.begin_launch();
  m.counters.begin_launch((m.n_threads + kWarp - 1) / kWarp);
  m.counters.drop();  // of a launch that ended in a fault
  std::mt19937 random(m.options.seed);
  const auto n_blocks = static_cast<int>(launch.grid.x * launch.grid.y * launch.grid.z);
  for (const int block : in_order(n_blocks, random)) {
    prepare_block(static_cast<std::size_t>(block));
    run_block(random);
  }
  m.global.check_guards();
}

}  // namespace simt

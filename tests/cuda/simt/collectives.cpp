// What lanes of a warp, or threads of a block, do together.
#include <array>

#include "simt/half.h"
#include "simt/machine.h"

namespace simt {

namespace {

// Two waiting lanes that name each other can only meet in the same collective.
void check_against_waiting(const Thread& t, std::uint32_t waiting) {
  for (std::uint32_t rest = waiting & t.collective.mask; rest != 0; rest &= rest - 1) {
    const Thread& other = machine().thread(t.warp, __builtin_ctz(rest));
    const Collective& theirs = other.collective;
    if ((theirs.mask >> t.lane & 1) == 0 || theirs.meets(t.collective)) continue;
    fail(t, t.collective.place,
         "divergent collective: lane %d is here with mask %08x, lane %d at %s with mask %08x", t.lane,
         t.collective.mask, other.lane, name_of(theirs.place).c_str(), theirs.mask);
  }
}

// The current thread waits until the live lanes of the mask do, and then goes on with its result filled in.
void meet(Kind kind, std::uint32_t mask, Site at, void* argument,
          void (*combine)(void* const*, std::uint32_t)) {
  Machine& m = machine();
  Thread& t = *m.current;
  if ((mask >> t.lane & 1) == 0) {
    fail(t, at, "wrong mask: lane %d calls a collective whose mask %08x leaves it out", t.lane, mask);
  }
  t.collective = {kind, mask, at, argument, combine};
  Warp& warp = m.warps[static_cast<std::size_t>(t.warp)];
  if (warp.waiting == 0) {
    warp.mixed = false;
  } else if (warp.mixed || !m.thread(t.warp, __builtin_ctz(warp.waiting)).collective.meets(t.collective)) {
    warp.mixed = true;
    check_against_waiting(t, warp.waiting);
  }
  warp.waiting |= 1u << t.lane;
  t.state = State::kInCollective;
  if (!complete_collective(t.warp, mask)) t.fiber.suspend();
}

}  // namespace

bool complete_collective(int warp, std::uint32_t mask) {
  Machine& m = machine();
  Warp& w = m.warps[static_cast<std::size_t>(warp)];
  const std::uint32_t lanes = mask & w.live;
  if (lanes == 0 || (w.waiting & lanes) != lanes) return false;
  std::array<void*, kWarp> arguments{};
  for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    Thread& t = m.thread(warp, lane);
    if (t.collective.mask != mask) return false;  // that lane has to meet others first
    arguments[static_cast<std::size_t>(lane)] = t.collective.argument;
  }
  const Collective& first = m.thread(warp, __builtin_ctz(lanes)).collective;
  if (first.combine != nullptr) first.combine(arguments.data(), lanes);
  if (lanes == w.live) {
    if (m.options.count) m.counters.flush(warp);
    if (first.kind == Kind::kSyncWarp) m.races.warp_barrier(warp);
  }
  w.waiting &= ~lanes;
  for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    m.thread(warp, __builtin_ctz(rest)).state = State::kReady;
  }
  ++m.n_collectives;
  return true;
}

void warp_barrier(std::uint32_t mask, Site at) { meet(Kind::kSyncWarp, mask, at, nullptr, nullptr); }

int block_barrier(Barrier kind, bool predicate, Site at) {
  Thread& t = *machine().current;
  t.barrier = kind;
  t.barrier_place = at;
  t.predicate = predicate;
  t.state = State::kAtBarrier;
  t.fiber.suspend();
  return t.barrier_result;
}

void fence() {
  Machine& m = machine();
  m.races.fence(*m.current);
}

// ---- shuffles and votes

namespace {

struct ShuffleArgument {
  std::uint64_t value, result;
  int source;
  const Thread* thread;
};

void combine_shuffle(void* const* arguments, std::uint32_t lanes) {
  for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    auto& mine = *static_cast<ShuffleArgument*>(arguments[__builtin_ctz(rest)]);
    if ((lanes >> mine.source & 1) == 0) {
      fail(*mine.thread, mine.thread->collective.place,
           "wrong mask: lane %d shuffles from lane %d, which takes no part (mask %08x)", mine.thread->lane,
           mine.source, mine.thread->collective.mask);
    }
    mine.result = static_cast<ShuffleArgument*>(arguments[mine.source])->value;
  }
}

// The rules of shfl.sync in the PTX ISA manual, with segments of `width` lanes.
int shuffle_source(Shuffle how, int lane, int operand, int width) {
  const int first = lane & ~(width - 1), last = first + width - 1;
  switch (how) {
    case Shuffle::kIndex:
      return first | (operand & (width - 1));
    case Shuffle::kXor:
      return (lane ^ operand) <= last ? lane ^ operand : lane;
    case Shuffle::kUp:
      return lane - operand >= first ? lane - operand : lane;
    case Shuffle::kDown:
      return lane + operand <= last ? lane + operand : lane;
  }
  return lane;
}

struct BallotArgument {
  bool predicate;
  std::uint32_t result;
};

void combine_ballot(void* const* arguments, std::uint32_t lanes) {
  std::uint32_t result = 0;
  for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (static_cast<BallotArgument*>(arguments[lane])->predicate) result |= 1u << lane;
  }
  for (std::uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
    static_cast<BallotArgument*>(arguments[__builtin_ctz(rest)])->result = result;
  }
}

}  // namespace

std::uint64_t shuffle_bits(Shuffle how, std::uint32_t mask, std::uint64_t value, int operand, int width,
                           Site at) {
  const Thread& t = *machine().current;
  if (width < 1 || width > kWarp || (width & (width - 1)) != 0 || operand < 0 ||
      (how != Shuffle::kIndex && operand >= kWarp)) {
    fail(t, at, "shuffle by %d in segments of %d lanes", operand, width);
  }
  ShuffleArgument argument{value, 0, shuffle_source(how, t.lane, operand, width), &t};
  meet(Kind::kShuffle, mask, at, &argument, combine_shuffle);
  return argument.result;
}

std::uint32_t ballot(std::uint32_t mask, bool predicate, Site at) {
  BallotArgument argument{predicate, 0};
  meet(Kind::kBallot, mask, at, &argument, combine_ballot);
  return argument.result;
}

// ---- matrices

namespace {

struct MmaArgument {
  float* c;
  const std::uint32_t* a;
  const std::uint32_t* b;
  int a_count, b_count;
};

struct MovMatrixArgument {
  std::uint32_t value, result;
};

std::uint16_t half_bits(std::uint32_t pair, int i) { return static_cast<std::uint16_t>(pair >> 16 * i); }

double half_value(std::uint32_t pair, int i) { return __half2float(__ushort_as_half(half_bits(pair, i))); }

void combine_mma(void* const* arguments, std::uint32_t) {
  std::array<std::array<double, 16>, 16> a{};  // [row][k]
  std::array<std::array<double, 8>, 16> b{};   // [k][column]
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    const auto& m = *static_cast<const MmaArgument*>(arguments[lane]);
    const std::size_t group = lane / 4, in_group = lane % 4;
    for (int j = 0; j < 2; ++j) {
      const std::size_t k = 2 * in_group + static_cast<std::size_t>(j);
      for (int i = 0; i < m.a_count; ++i) {
        const auto row_half = static_cast<std::size_t>(i % 2), k_half = static_cast<std::size_t>(i / 2);
        a[group + 8 * row_half][k + 8 * k_half] = half_value(m.a[i], j);
      }
      for (int i = 0; i < m.b_count; ++i)
        b[k + 8 * static_cast<std::size_t>(i)][group] = half_value(m.b[i], j);
    }
  }
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    const auto& m = *static_cast<const MmaArgument*>(arguments[lane]);
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      double sum = m.c[i];
      for (std::size_t k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      m.c[i] = static_cast<float>(sum);
    }
  }
}

void combine_movmatrix(void* const* arguments, std::uint32_t) {
  std::array<std::array<std::uint16_t, 8>, 8> matrix{};
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    for (std::size_t j = 0; j < 2; ++j) {
      matrix[lane / 4][2 * (lane % 4) + j] =
          half_bits(static_cast<MovMatrixArgument*>(arguments[lane])->value, static_cast<int>(j));
    }
  }
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    const std::size_t row = lane / 4, column = 2 * (lane % 4);
    static_cast<MovMatrixArgument*>(arguments[lane])->result =
        matrix[column][row] | static_cast<std::uint32_t>(matrix[column + 1][row]) << 16;
  }
}

struct LdMatrixArgument {
  std::array<std::uint16_t, 8> row;
  std::uint32_t* d;
  bool trans;
};

void combine_ldmatrix(void* const* arguments, std::uint32_t) {
  const auto element = [&](std::size_t matrix, std::size_t row, std::size_t column) {
    return static_cast<const LdMatrixArgument*>(arguments[8 * matrix + row])->row[column];
  };
  for (std::size_t lane = 0; lane < kWarp; ++lane) {
    const auto& m = *static_cast<const LdMatrixArgument*>(arguments[lane]);
    const std::size_t row = lane / 4, column = 2 * (lane % 4);
    for (std::size_t i = 0; i < 4; ++i) {
      const std::uint16_t low = m.trans ? element(i, column, row) : element(i, row, column);
      const std::uint16_t high = m.trans ? element(i, column + 1, row) : element(i, row, column + 1);
      m.d[i] = low | static_cast<std::uint32_t>(high) << 16;
    }
  }
}

// .aligned: all 32 lanes.
void need_full_warp(Site at) {
  const Thread& t = *machine().current;
  const std::uint32_t live = machine().warps[static_cast<std::size_t>(t.warp)].live;
  if (live != 0xffffffffu) fail(t, at, "an aligned instruction needs all 32 lanes, live are %08x", live);
}

}  // namespace

void mma_m16n8(float (&c)[4], const std::uint32_t* a, int a_count, const std::uint32_t* b, int b_count,
               Site at) {
  need_full_warp(at);
  MmaArgument argument{c, a, b, a_count, b_count};
  meet(Kind::kMma, 0xffffffffu, at, &argument, combine_mma);
}

std::uint32_t movmatrix_trans(std::uint32_t x, Site at) {
  need_full_warp(at);
  MovMatrixArgument argument{x, 0};
  meet(Kind::kMovMatrix, 0xffffffffu, at, &argument, combine_movmatrix);
  return argument.result;
}

void ldmatrix_x4(std::uint32_t (&d)[4], const void* row, bool trans, Site at) {
  need_full_warp(at);
  LdMatrixArgument argument{{}, d, trans};
  load_shared(argument.row.data(), row, sizeof argument.row, at);
  meet(Kind::kLdMatrix, 0xffffffffu, at, &argument, combine_ldmatrix);
}

}  // namespace simt

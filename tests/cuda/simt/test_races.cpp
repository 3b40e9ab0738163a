// The race build against a definition by pairs: random programs of a block have a race if and only if two
// accesses of different threads overlap, one of them a write, with no barrier of the block, or of their warp,
// between.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "simt/helpers.h"
#include "simt/kernels.h"
#include "simt/simt.h"

using namespace simt;

namespace {

constexpr int kThreads = 80, kSteps = 6;

using kernels::Step;

struct Program {
  std::vector<Step> steps;          // [kSteps][kThreads]
  std::vector<std::uint8_t> syncs;  // [kSteps], behind the accesses of the step: 1 of warps, 2 of the block
};

Program random_program(std::mt19937& random) {
  Program p{std::vector<Step>(kSteps * kThreads, Step{}), std::vector<std::uint8_t>(kSteps)};
  const unsigned n_accesses = 2 + random() % 6, n_words = 1 + random() % 4;
  const unsigned warps = random() % 2 == 0 ? 1 : 3;  // often in one warp, where its barriers count
  for (unsigned i = 0; i < n_accesses; ++i) {
    const unsigned thread = random() % (warps == 1 ? 8 : kThreads), bytes = 1u << random() % 3;
    const unsigned address = random() % (4 * n_words) / bytes * bytes;
    p.steps[random() % kSteps * kThreads + thread] = {static_cast<std::uint8_t>(1 + random() % 2),
                                                      static_cast<std::uint8_t>(bytes),
                                                      static_cast<std::uint8_t>(address)};
  }
  for (std::uint8_t& s : p.syncs) s = static_cast<std::uint8_t>(random() % 3);
  return p;
}

bool overlap(const Step& a, const Step& b) {
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

bool has_race(const Program& p) {
  const auto ordered = [&](int thread, int step, int other_thread, int other_step) {
    for (int s = std::min(step, other_step); s < std::max(step, other_step); ++s) {
      const std::uint8_t sync = p.syncs[static_cast<std::size_t>(s)];
      if (sync == 2 || (sync == 1 && thread / 32 == other_thread / 32)) return true;
    }
    return false;
  };
  for (int i = 0; i < kSteps * kThreads; ++i) {
    for (int j = 0; j < i; ++j) {
      const Step &a = p.steps[static_cast<std::size_t>(i)], &b = p.steps[static_cast<std::size_t>(j)];
      if (a.op == 0 || b.op == 0 || (a.op == 1 && b.op == 1) || i % kThreads == j % kThreads) continue;
      if (overlap(a, b) && !ordered(i % kThreads, i / kThreads, j % kThreads, j / kThreads)) return true;
    }
  }
  return false;
}

template <class Kernel>
bool finds_race(const Program& p, Kernel kernel) {
  Buffer<Step> steps("steps", p.steps);
  Buffer<std::uint8_t> syncs("syncs", p.syncs), memory("memory", 16);
  try {
    LAUNCH(kernel, 1, kThreads, 0, nullptr, steps.data(), syncs.data(), kSteps, memory.data());
  } catch (const Fault& fault) {
    CHECK(std::string(fault.what()).find(": race: ") != std::string::npos);
    return true;
  }
  return false;
}

}  // namespace

TEST_CASE("random programs") {
  if (!kRaceBuild) return;
  std::mt19937 random(11);
  int n_races = 0;
  for (int i = 0; i < 400; ++i) {
    CAPTURE(i);
    const Program p = random_program(random);
    const bool race = has_race(p);
    n_races += race ? 1 : 0;
    in_every_order([&] {
      CHECK(finds_race(p, kernels::run_steps<false>) == race);
      CHECK(finds_race(p, kernels::run_steps<true>) == race);
    });
  }
  CHECK(n_races > 100);
  CHECK(n_races < 300);
}

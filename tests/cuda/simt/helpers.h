// What the tests of the executor share.
#pragma once

#include <doctest/doctest.h>

#include <fstream>
#include <string>

#include "simt/simt.h"

namespace simt {

// Builds in which everything takes several times as long.
constexpr bool kSlowBuild = kRaceBuild ||
#if defined(__SANITIZE_ADDRESS__)
                            true;
#else
                            false;
#endif

// The larger of two errors. No number is the largest, and stays: an output that nothing wrote is NaN.
inline double larger(double worst, double error) { return error <= worst ? worst : error; }

// Runs a test in one of the three orders of the executor, the random one with several seeds.
constexpr unsigned kWays = 5;
template <class Test>
void in_one_order(unsigned i, Test test) {
  struct Restore {
    Options before = options();
    ~Restore() { options() = before; }
  } restore;
  const unsigned way = i % kWays, seed = way < 2 ? 1 : way - 1;
  const Order order = way == 0 ? Order::kForward : way == 1 ? Order::kBackward : Order::kRandom;
  CAPTURE(static_cast<int>(order));
  CAPTURE(seed);
  options().order = order;
  options().seed = seed;
  reset_report();
  test();
}

// Runs it in all of them; on a GPU, once.
template <class Test>
void in_every_order(Test test) {
  for (unsigned i = 0; i < (kHardware ? 1 : kWays); ++i) in_one_order(i, test);
}

// The number of the line of a file of this folder that ends in the text.
inline int line_ending_in(const std::string& file, const std::string& text) {
  const std::string folder = __FILE__;
  std::ifstream in(folder.substr(0, folder.find_last_of('/') + 1) + file);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.size() >= text.size() && line.compare(line.size() - text.size(), text.size(), text) == 0)
      return number;
  }
  FAIL("no line of " << file << " ends in " << text);
  return 0;
}

}  // namespace simt

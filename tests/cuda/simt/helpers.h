// What the tests of the executor share.
#pragma once

#include <doctest/doctest.h>

#include <fstream>
#include <string>

#include "simt/simt.h"

namespace simt {

// Runs a test in the three orders of the executor, and with several seeds of the random one; on a GPU, once.
template <class Test>
void in_every_order(Test test) {
  if (kHardware) return test();
  struct Way {
    Order order;
    unsigned seed;
  };
  struct Restore {
    Options before = options();
    ~Restore() { options() = before; }
  } restore;
  for (const Way way : {Way{Order::kForward, 1}, Way{Order::kBackward, 1}, Way{Order::kRandom, 1},
                        Way{Order::kRandom, 2}, Way{Order::kRandom, 3}}) {
    CAPTURE(static_cast<int>(way.order));
    CAPTURE(way.seed);
    options().order = way.order;
    options().seed = way.seed;
    reset_report();
    test();
  }
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

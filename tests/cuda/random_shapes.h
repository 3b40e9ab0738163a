// Shapes at random, the same in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

#include "simt/helpers.h"

namespace shapes {

constexpr int kMany = simt::kSlowBuild ? 8 : 40;  // that a test looks at

class Choice {
 public:
  explicit Choice(unsigned seed) : random_(seed) {}
  // Both included.
  template <class T, class U>
  auto between(T least, U most) {
    const auto from = std::int64_t{least}, n = std::int64_t{most} - from + 1;
    return static_cast<decltype(least + most)>(
        from + static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n)));
  }
  template <class T, std::size_t N>
  T one_of(const T (&choices)[N]) {
    return choices[random_() % N];
  }
  bool once_in(int n) { return between(1, n) == 1; }

 private:
  std::mt19937 random_;
};

}  // namespace shapes

// Shapes at random, the same in every run.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>

#include "simt/helpers.h"

namespace shapes {

// How many a test looks at: fewer where each takes several times as long.
constexpr int kMany =
#if defined(__SANITIZE_ADDRESS__)
    8;
#else
    simt::kRaceBuild ? 8 : 40;
#endif

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
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int>(choices.size()) - 1)];
  }
  bool once_in(int n) { return between(1, n) == 1; }

 private:
  std::mt19937 random_;
};

}  // namespace shapes

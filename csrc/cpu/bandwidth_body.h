// Reads of memory, compiled once for each instruction set. Everything here has internal linkage.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ringlm::cpu {

constexpr std::size_t kReadUnit = 256;  // bytes that a stream reads before the next one has its turn

// The sum of the 64-bit words of `units` units, which are aligned to one.
using ReadPattern = std::uint64_t (*)(const std::byte* data, std::size_t units);
using ReadPatterns = std::array<ReadPattern, 5>;

extern const ReadPatterns kReadGeneric, kReadAvx2, kReadAvx512;

namespace {

template <int bytes>
using Words [[gnu::vector_size(bytes), gnu::may_alias]] = std::uint64_t;

// In `streams` streams, each of them fetched `ahead` bytes before it is used (0: by the hardware alone). Four
// sums, so that no load waits for an addition.
template <int width, int streams, int ahead>
std::uint64_t sum_of(const std::byte* data, std::size_t units) {
  Words<width> sums[4] = {};
  const std::size_t length = units / streams;
  const auto read = [&](const std::byte* unit) {
    for (int line = 0; ahead > 0 && line < int{kReadUnit}; line += 64)
      __builtin_prefetch(unit + ahead + line);
    for (int i = 0; i < int{kReadUnit} / width; ++i) {
      sums[i % 4] += *reinterpret_cast<const Words<width>*>(unit + i * width);
    }
  };
  for (std::size_t i = 0; i < length; ++i) {
    for (std::size_t s = 0; s < streams; ++s) read(data + (s * length + i) * kReadUnit);
  }
  for (std::size_t i = streams * length; i < units; ++i) read(data + i * kReadUnit);
  const Words<width> all = sums[0] + sums[1] + sums[2] + sums[3];
  std::uint64_t sum = 0;
  for (int i = 0; i < width / 8; ++i) sum += all[i];
  return sum;
}

template <int width>
constexpr ReadPatterns kRead = {sum_of<width, 1, 0>, sum_of<width, 4, 0>, sum_of<width, 1, 16384>,
                                sum_of<width, 2, 4096>, sum_of<width, 4, 1024>};

}  // namespace
}  // namespace ringlm::cpu

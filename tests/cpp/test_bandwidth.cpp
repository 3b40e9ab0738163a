// The reader that says how fast memory is.
#include "cpu/bandwidth.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "cpu/bandwidth_body.h"
#include "ringlm/error.h"

using namespace ringlm;
using cpu::MemoryReader;

namespace {

std::uint64_t expected_sum(std::size_t bytes) {
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < bytes / 8; ++i) sum += MemoryReader::word(i);
  return sum;
}

}  // namespace

TEST_CASE("every byte is read once in a pass, by any number of threads, in any number of parts") {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{256}, std::size_t{257}, std::size_t{1} << 20,
                                  (std::size_t{1} << 20) + 3 * 256}) {
    for (const int threads : {1, 2, 3}) {
      MemoryReader reader(bytes, threads);
      CHECK(reader.bytes() == (bytes + 255) / 256 * 256);
      CHECK(reader.n_threads() == threads);
      for (const int parts : {1, 2, 7, 300}) {
        const std::vector<double> seconds = reader.read(3, parts);
        REQUIRE(seconds.size() == 3);
        for (const double s : seconds) CHECK(s >= 0.0);
        REQUIRE(reader.sum() == expected_sum(reader.bytes()));
      }
    }
  }
}

TEST_CASE("every pattern of every instruction set reads every byte once") {
  std::vector<const cpu::ReadPatterns*> sets{&cpu::kReadGeneric};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) sets.push_back(&cpu::kReadAvx2);
  if (__builtin_cpu_supports("avx512f")) sets.push_back(&cpu::kReadAvx512);
#endif
  constexpr std::size_t most = 23;
  std::vector<std::uint64_t> memory((most + 1) * cpu::kReadUnit / 8);
  auto* bytes = reinterpret_cast<std::byte*>(memory.data());
  bytes += cpu::kReadUnit - reinterpret_cast<std::uintptr_t>(bytes) % cpu::kReadUnit;
  for (std::size_t units = 0; units <= most; ++units) {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < units * cpu::kReadUnit / 8; ++i) {
      const std::uint64_t word = MemoryReader::word(i);
      std::memcpy(bytes + 8 * i, &word, 8);
      sum += word;
    }
    for (const cpu::ReadPatterns* set : sets) {
      for (const cpu::ReadPattern pattern : *set) CHECK(pattern(bytes, units) == sum);
    }
  }
}

TEST_CASE("the bandwidth is one that a machine can have") {
  MemoryReader reader(std::size_t{32} << 20, 2);
  const std::vector<double> seconds = reader.read(5);
  const double gbs =
      static_cast<double>(reader.bytes()) / *std::min_element(seconds.begin(), seconds.end()) / 1e9;
  CHECK(gbs > 0.01);
  CHECK(gbs < 10000.0);
}

TEST_CASE("what cannot be read is refused") {
  CHECK_THROWS_AS(MemoryReader(0, 1), InvalidArgument);
  CHECK_THROWS_AS(MemoryReader(1024, 0), InvalidArgument);
  CHECK_THROWS_AS(MemoryReader(std::size_t{1} << 60, 1), OutOfMemory);
  MemoryReader reader(1024, 1);
  CHECK_THROWS_AS(reader.read(0), InvalidArgument);
  CHECK_THROWS_AS(reader.read(1, 0), InvalidArgument);
}

// top_k against a sort.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/launch.h"
#include "simt/helpers.h"

using namespace ringlm;
using namespace ringlm::cuda;
using simt::Buffer;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = HUGE_VALF;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> random_logits(std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(size(n));
  for (float& v : values) v = 3.0f * normal(random);
  return values;
}

// What a call gives and, of small rows, a second one with the counters that the first has left. `shift`:
// floats by which the first row is off from 16 bytes.
void check_top_k(int M, int n_vocab, int k, const std::vector<float>& logits, int shift = 0) {
  CAPTURE(n_vocab);
  CAPTURE(k);
  std::vector<float> shifted(size(shift), 1e30f);
  shifted.insert(shifted.end(), logits.begin(), logits.end());
  Buffer<float> from("logits", shifted);
  Buffer<TopLogits> out("candidates", size(M));
  Buffer<unsigned> arrived("arrived", std::vector<unsigned>(size(M), 0));
  Buffer<std::uint32_t> bad("bad", std::vector<std::uint32_t>(size(M), 0));
  TopK a{from.data() + shift, M, n_vocab, k, out.data(), nullptr, arrived.data(), bad.data()};
  Buffer<std::byte> scratch("scratch", top_k_scratch_bytes(a));
  a.scratch = scratch.data();
  top_k(a, nullptr);
  if (n_vocab < 20000) {
    std::ranges::fill(out, TopLogits{});
    top_k(a, nullptr);
  }

  for (int m = 0; m < M; ++m) {
    const float* const row = &logits[size(m) * size(n_vocab)];
    std::vector<int> order(size(n_vocab));
    std::iota(order.begin(), order.end(), 0);
    const int n = std::min(k, n_vocab);
    std::partial_sort(order.begin(), order.begin() + n, order.end(),
                      [&](int i, int j) { return row[i] > row[j] || (row[i] == row[j] && i < j); });
    const TopLogits& got = out[size(m)];
    int wrong = 0;
    for (int i = 0; i < kTopLogits; ++i) {
      const bool right =
          i < n ? got.ids[i] == order[size(i)] && got.logits[i] == row[order[size(i)]] : got.ids[i] == -1;
      wrong += right ? 0 : 1;
    }
    CHECK(wrong == 0);
    CHECK(arrived[size(m)] == 0);
    CHECK(bad[size(m)] == 0);
  }
  CHECK(simt::report().bypasses == 0);
  CHECK(simt::report().bypass_lines == std::vector<std::string>{});
}

}  // namespace

TEST_CASE("top_k of several rows that begin anywhere") {
  simt::in_every_order([] {
    for (const int k : {1, 2, 40, 64}) check_top_k(3, 9001, k, random_logits(3 * 9001, 1), 1);
  });
  for (const int shift : {0, 2, 3}) check_top_k(2, 4093, 5, random_logits(2 * 4093, 2), shift);
}

TEST_CASE("top_k of small rows") {
  for (const int n : {1, 3, 63, 64, 65, 200}) {
    for (const int k : {1, 7, 64}) check_top_k(2, n, k, random_logits(2 * n, 3));
  }
}

TEST_CASE("top_k of large vocabularies, and of one that takes several pieces a block") {
  check_top_k(1, 262144, 64, random_logits(262144, 4));
  check_top_k(1, 128256, 1, random_logits(128256, 5));
  check_top_k(1, 270001, 50, random_logits(270001, 6), 3);
}

TEST_CASE("top_k of equal logits, of sorted ones, and of the largest in one thread") {
  constexpr int n = 10000;
  std::vector<float> x(n, -2.5f);
  check_top_k(1, n, 64, x);
  check_top_k(1, n, 1, x);
  for (int i = 0; i < n; ++i) x[size(i)] = i % 2 == 0 ? 0.0f : -0.0f;
  check_top_k(1, n, 33, x);
  for (int i = 0; i < n; ++i) x[size(i)] = static_cast<float>(i);
  check_top_k(1, n, 64, x);
  for (int i = 0; i < n; ++i) x[size(i)] = static_cast<float>(-i / 3);
  check_top_k(1, n, 64, x);
  x = random_logits(n, 7);
  for (int i = 0; i < 4; ++i) {
    for (int e = 0; e < 4; ++e) x[size(4096 + 4 * (256 * i + 17) + e)] += 1000.0f;
  }
  check_top_k(1, n, 20, x);
}

TEST_CASE("top_k reads a logit once, in requests of 16 bytes where the row is aligned" *
          doctest::skip(simt::kHardware)) {
  const std::vector<float> x = random_logits(32768, 8);
  simt::reset_report();
  Buffer<float> from("logits", x);
  Buffer<TopLogits> out("candidates", 1);
  Buffer<unsigned> arrived("arrived", std::vector<unsigned>{0});
  Buffer<std::uint32_t> bad("bad", std::vector<std::uint32_t>{0});
  TopK a{from.data(), 1, 32768, 64, out.data(), nullptr, arrived.data(), bad.data()};
  Buffer<std::byte> scratch("scratch", top_k_scratch_bytes(a));
  a.scratch = scratch.data();
  top_k(a, nullptr);
  const simt::BufferCount count = simt::report().buffer("logits");
  CHECK(count.bytes_read == 4 * 32768);
  CHECK(count.sectors_read == 32768 / 8);
}

TEST_CASE("top_k: rows with a logit that is not finite are named") {
  constexpr int kRows = 6, n = 5001;
  std::vector<float> x = random_logits(kRows * n, 9);
  x[size(0 * n + 4999)] = kNaN;
  x[size(2 * n)] = kInf;
  x[size(3 * n + 5000)] = -kInf;
  x[size(5 * n + 77)] = -kNaN;
  for (const int k : {1, 10}) {
    simt::in_every_order([&] {
      Buffer<float> from("logits", x);
      Buffer<TopLogits> out("candidates", kRows);
      Buffer<unsigned> arrived("arrived", std::vector<unsigned>(kRows, 0));
      Buffer<std::uint32_t> bad("bad", std::vector<std::uint32_t>(kRows, 0));
      TopK a{from.data(), kRows, n, k, out.data(), nullptr, arrived.data(), bad.data()};
      Buffer<std::byte> scratch("scratch", top_k_scratch_bytes(a));
      a.scratch = scratch.data();
      top_k(a, nullptr);
      CHECK(std::vector<std::uint32_t>(bad.begin(), bad.end()) ==
            std::vector<std::uint32_t>{1, 0, 1, 1, 0, 1});
      CHECK(std::ranges::all_of(arrived, [](unsigned count) { return count == 0; }));
      for (const TopLogits& c : out) {
        for (int i = 0; i < k; ++i) CHECK((c.ids[i] >= 0 && c.ids[i] < n));
      }
    });
  }
}

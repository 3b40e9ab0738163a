// Kernels that are right give the right results, in every order, and nothing is found in them.
#include "simt/simt.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "simt/helpers.h"
#include "simt/kernels.h"

using namespace simt;

namespace {

std::vector<float> random_floats(std::size_t n) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& v : values) v = normal(random);
  return values;
}

std::vector<half> random_halves(std::size_t n) {
  std::vector<half> values(n);
  const std::vector<float> floats = random_floats(n);
  for (std::size_t i = 0; i < n; ++i) values[i] = __float2half(floats[i]);
  return values;
}

double sum_of(const std::vector<float>& values) {
  double sum = 0;
  for (const float v : values) sum += v;
  return sum;
}

void check_no_bypass() {
  const Report r = report();
  CHECK(r.bypasses == 0);
  CHECK(r.bypass_lines == std::vector<std::string>{});
}

}  // namespace

TEST_CASE("the three orders") {
  constexpr unsigned kBlocks = 3, kThreads = 70, kAll = kBlocks * kThreads;
  const Options before = options();
  const auto order_of = [&](Order order, unsigned seed) {
    options().order = order;
    options().seed = seed;
    Buffer<unsigned> count("count", std::vector<unsigned>{0});
    Buffer<int> threads("threads", kAll);
    LAUNCH(kernels::order_of_threads, kBlocks, kThreads, 0, nullptr, count.data(), threads.data());
    options() = before;
    return std::vector<int>(threads.begin(), threads.end());
  };
  std::vector<int> ascending(kAll);
  std::iota(ascending.begin(), ascending.end(), 0);
  CHECK(order_of(Order::kForward, 1) == ascending);
  CHECK(order_of(Order::kBackward, 1) == std::vector<int>(ascending.rbegin(), ascending.rend()));
  std::vector<int> random = order_of(Order::kRandom, 1);
  CHECK(random == order_of(Order::kRandom, 1));
  CHECK(random != order_of(Order::kRandom, 2));
  CHECK(random != ascending);
  std::sort(random.begin(), random.end());
  CHECK(random == ascending);
}

TEST_CASE("reduction by shuffles") {
  in_every_order([] {
    const std::vector<float> values = random_floats(1000);
    Buffer<float> x("x", values), sums("sums", 3);
    LAUNCH(kernels::block_sum, 3, 96, 0, nullptr, x.data(), 1000, sums.data());
    CHECK(static_cast<double>(sums[0]) + sums[1] + sums[2] == doctest::Approx(sum_of(values)).epsilon(1e-4));
    check_no_bypass();
  });
}

TEST_CASE("cp.async double buffer") {
  in_every_order([] {
    constexpr int kRows = 9;
    const std::vector<float> values = random_floats(kRows * 256);
    Buffer<float> x("x", values), sums("sums", 256);
    LAUNCH(kernels::column_sums, 1, 64, 2 * 256 * sizeof(float), nullptr, x.data(), kRows, sums.data());
    for (std::size_t c = 0; c < 256; ++c) {
      double sum = 0;
      for (std::size_t r = 0; r < kRows; ++r) sum += values[r * 256 + c];
      CHECK(sums[c] == doctest::Approx(sum).epsilon(1e-4));
    }
    check_no_bypass();
  });
}

TEST_CASE_TEMPLATE("tile product on tensor cores", Depth, std::integral_constant<int, 8>,
                   std::integral_constant<int, 16>) {
  in_every_order([] {
    constexpr int kDepth = 64;
    const std::vector<half> a = random_halves(16 * kDepth), b = random_halves(8 * kDepth);
    Buffer<half> a_device("a", a), b_device("b", b);
    Buffer<float> c("c", 16 * 8);
    LAUNCH(kernels::tile_product<Depth::value>, 1, 32, 0, nullptr, a_device.data(), b_device.data(), c.data(),
           kDepth);
    for (std::size_t row = 0; row < 16; ++row) {
      for (std::size_t column = 0; column < 8; ++column) {
        double sum = 0;
        for (std::size_t k = 0; k < kDepth; ++k) {
          sum +=
              static_cast<double>(__half2float(a[row * kDepth + k])) * __half2float(b[column * kDepth + k]);
        }
        CHECK(c[row * 8 + column] == doctest::Approx(sum).epsilon(1e-5));
      }
    }
    check_no_bypass();
  });
}

TEST_CASE("the last block to arrive combines") {
  in_every_order([] {
    const std::vector<float> values = random_floats(40 * 64 - 5);
    Buffer<float> x("x", values), partial("partial", 40), sum("sum", 1);
    Buffer<unsigned> arrived("arrived", std::vector<unsigned>{0});
    for (int launch = 0; launch < 2; ++launch) {  // the counter is ready for the next launch
      sum[0] = 0.0f;
      LAUNCH(kernels::sum_by_last_block<kernels::Fences::kBoth>, 40, 64, 0, nullptr, x.data(),
             static_cast<int>(values.size()), partial.data(), arrived.data(), sum.data());
      CHECK(sum[0] == doctest::Approx(sum_of(values)).epsilon(1e-4));
      CHECK(arrived[0] == 0);
    }
    check_no_bypass();
  });
}

TEST_CASE("whoever releases what the block wrote") {
  using kernels::Who;
  for (const auto kernel :
       {kernels::spread_and_sum<Who::kThread0>, kernels::spread_and_sum<Who::kEveryThread>,
        kernels::spread_and_sum<Who::kWarp>}) {
    in_every_order([&] {
      Buffer<float> x("x", std::vector<float>{1.0f, 20.0f, 300.0f}), spread("spread", 3 * 32), y("y", 32);
      Buffer<unsigned> arrived("arrived", std::vector<unsigned>{0});
      LAUNCH(kernel, 3, 32, 0, nullptr, x.data(), spread.data(), arrived.data(), y.data());
      for (std::size_t i = 0; i < 32; ++i) CHECK(y[i] == 321.0f + 3.0f * static_cast<float>(i));
    });
  }
}

TEST_CASE("shared arrays of device functions") {
  Buffer<int> y("y", 32);
  LAUNCH((kernels::scratch_places<8, 16>), 1, 32, 0, nullptr, y.data());
  for (const int found : y) CHECK(found == 3);
}

TEST_CASE("device memory has its exact size, an alignment of 256 bytes, and NaNs in it") {
  for (const std::size_t count : {1, 3, 64, 1000}) {
    Buffer<float> x("x", count);
    CHECK(reinterpret_cast<std::uintptr_t>(x.data()) % 256 == 0);
    CHECK(report().buffer("x").size == 4 * count);
    for (const float v : x) CHECK(std::isnan(v));
  }
}

TEST_CASE("barriers that count, in a block of two dimensions") {
  in_every_order([] {
    Buffer<int> y("y", 3 * 50);
    LAUNCH(kernels::barrier_votes, 1, dim3(10, 5), 0, nullptr, y.data());
    for (std::size_t i = 0; i < 50; ++i) {
      CHECK(y[3 * i] == 25);
      CHECK(y[3 * i + 1] == 0);
      CHECK(y[3 * i + 2] == 1);
    }
  });
}

TEST_CASE("atomics") {
  in_every_order([] {
    Buffer<int> y("y", std::vector<int>(5, 0));
    Buffer<unsigned> wrapping("wrapping", std::vector<unsigned>{0});
    LAUNCH(kernels::atomics_of, 1, 64, 0, nullptr, y.data(), wrapping.data());
    CHECK(y[0] == 64);
    CHECK(y[1] == 63);
    CHECK(y[2] == -63);
    CHECK(y[3] == 7);
    CHECK(y[4] == 9);
    CHECK(wrapping[0] == 64 % 10);
  });
}

TEST_CASE("a kernel of its own per thread: arguments are copied, indices are right") {
  Buffer<int> y("y", 24);
  for (int& v : y) v = -1;
  const auto blocks = dim3(2, 3, 2), threads = dim3(2, 1, 1);
  struct Kernel {
    static void fill(int* to, int plus) {
      const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
      const unsigned i = threadIdx.x + blockDim.x * block;
      plus += static_cast<int>(i);  // its own copy
      ringlm::cuda::st_global(to + i, plus);
    }
  };
  LAUNCH(Kernel::fill, blocks, threads, 0, nullptr, y.data(), 100);
  for (std::size_t i = 0; i < 24; ++i) CHECK(y[i] == 100 + static_cast<int>(i));
}

// The host twins of csrc/cuda/port.h against the definitions in the PTX ISA manual, element by element.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "simt/helpers.h"
#include "simt/kernels.h"
#include "simt/simt.h"

using namespace simt;

namespace {

constexpr std::size_t kLanes = 32;

std::uint32_t pair_of(std::uint16_t low, std::uint16_t high) {
  return low | static_cast<std::uint32_t>(high) << 16;
}

std::uint16_t half_of(int value) { return __half_as_ushort(__int2half_rn(value)); }

// The manual's tables "Matrix Fragments for mma.m16n8k8" and "... m16n8k16": element i of a lane's fragment,
// with groupID = lane >> 2 and threadID_in_group = lane % 4.
std::size_t a_row(std::size_t lane, std::size_t i) { return lane / 4 + ((i / 2) % 2 == 0 ? 0 : 8); }
std::size_t a_column(std::size_t lane, std::size_t i) { return lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8); }
std::size_t b_row(std::size_t lane, std::size_t i) { return lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8); }
std::size_t b_column(std::size_t lane) { return lane / 4; }
std::size_t c_row(std::size_t lane, std::size_t i) { return lane / 4 + (i < 2 ? 0 : 8); }
std::size_t c_column(std::size_t lane, std::size_t i) { return lane % 4 * 2 + (i & 1); }

}  // namespace

TEST_CASE_TEMPLATE("mma.m16n8k8 and mma.m16n8k16", Depth, std::integral_constant<int, 8>,
                   std::integral_constant<int, 16>) {
  constexpr std::size_t kDepth = Depth::value;
  std::mt19937 random(3);
  const auto small = [&] { return static_cast<int>(random() % 17) - 8; };  // sums are exact in float
  std::array<std::array<int, kDepth>, 16> a;
  std::array<std::array<int, 8>, kDepth> b;
  std::array<std::array<int, 8>, 16> c;
  for (auto& row : a) std::generate(row.begin(), row.end(), small);
  for (auto& row : b) std::generate(row.begin(), row.end(), small);
  for (auto& row : c) std::generate(row.begin(), row.end(), small);

  constexpr std::size_t kA = kDepth / 4, kB = kDepth / 8;  // registers
  Buffer<std::uint32_t> a_pairs("a", kLanes * kA), b_pairs("b", kLanes * kB);
  Buffer<float> sums("c", kLanes * 4);
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    const auto a_at = [&](std::size_t i) { return half_of(a[a_row(lane, i)][a_column(lane, i)]); };
    const auto b_at = [&](std::size_t i) { return half_of(b[b_row(lane, i)][b_column(lane)]); };
    for (std::size_t r = 0; r < kA; ++r) a_pairs[lane * kA + r] = pair_of(a_at(2 * r), a_at(2 * r + 1));
    for (std::size_t r = 0; r < kB; ++r) b_pairs[lane * kB + r] = pair_of(b_at(2 * r), b_at(2 * r + 1));
    for (std::size_t i = 0; i < 4; ++i) {
      sums[lane * 4 + i] = static_cast<float>(c[c_row(lane, i)][c_column(lane, i)]);
    }
  }
  LAUNCH(kernels::mma_registers<Depth::value>, 1, 32, 0, nullptr, a_pairs.data(), b_pairs.data(),
         sums.data());
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t row = c_row(lane, i), column = c_column(lane, i);
      int sum = c[row][column];
      for (std::size_t k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
      CHECK(sums[lane * 4 + i] == static_cast<float>(sum));
    }
  }
}

TEST_CASE("movmatrix.trans") {
  // "Each thread holds a fragment of one row": lane / 4, elements 2 (lane % 4) and the next.
  Buffer<std::uint32_t> x("x", kLanes), y("y", kLanes);
  const auto element = [](std::size_t row, std::size_t column) {
    return static_cast<std::uint16_t>(row * 100 + column);
  };
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    x[lane] = pair_of(element(lane / 4, lane % 4 * 2), element(lane / 4, lane % 4 * 2 + 1));
  }
  LAUNCH(kernels::movmatrix_of, 1, 32, 0, nullptr, x.data(), y.data());
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    CHECK(y[lane] == pair_of(element(lane % 4 * 2, lane / 4), element(lane % 4 * 2 + 1, lane / 4)));
  }
}

TEST_CASE_TEMPLATE("ldmatrix.x4 and ldmatrix.x4.trans", Stride, std::integral_constant<int, 8>,
                   std::integral_constant<int, 24>) {
  // "Threads 0-7, 8-15, 16-23, 24-31: addr0-addr7 of matrix 0, 1, 2, 3"; register i is of matrix i, and each
  // thread's fragment that of movmatrix.
  Buffer<half> x("x", 4 * 64);
  Buffer<std::uint32_t> y("y", 2 * kLanes * 4);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = __int2half_rn(static_cast<int>(i));
  const auto element = [](std::size_t matrix, std::size_t row, std::size_t column) {
    return half_of(static_cast<int>(64 * matrix + 8 * row + column));
  };
  in_every_order([&] {
    LAUNCH(kernels::ldmatrix_of<Stride::value>, 1, 32, 0, nullptr, x.data(), y.data());
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const std::size_t row = lane / 4, column = lane % 4 * 2;
      for (std::size_t i = 0; i < 4; ++i) {
        CHECK(y[4 * lane + i] == pair_of(element(i, row, column), element(i, row, column + 1)));
        CHECK(y[4 * (kLanes + lane) + i] == pair_of(element(i, column, row), element(i, column + 1, row)));
      }
    }
    // Rows next to one another, or an odd number of 16 bytes apart, are in different banks.
    const LineCount loads = report().line(
        Op::kSharedLoad, "kernels.h", line_ending_in("kernels.h", "ldmatrix_x4(d, &rows[lane * kStride]);"));
    CHECK(loads.wavefronts == 4);
  });
}

TEST_CASE("ex2.approx.ftz") {
  constexpr float kInfinity = std::numeric_limits<float>::infinity(), kSubnormal = 1e-40f;
  // The manual's table of special inputs; then results around the least normal number, 2^-126.
  const std::vector<float> in{-kInfinity,    -kSubnormal, -0.0f,   0.0f,    kSubnormal, kInfinity,
                              std::nanf(""), -126.0f,     -126.5f, -149.0f, 128.0f,     127.0f};
  const std::vector<float> out{0.0f, 1.0f,      1.0f, 1.0f, 1.0f,      kInfinity,
                               0.0f, 0x1p-126f, 0.0f, 0.0f, kInfinity, 0x1p127f};
  Buffer<float> x("x", in), y("y", in.size());
  LAUNCH(kernels::ex2_of, 1, static_cast<unsigned>(in.size()), 0, nullptr, x.data(), y.data());
  for (std::size_t i = 0; i < in.size(); ++i) {
    CAPTURE(in[i]);
    if (std::isnan(in[i])) {
      CHECK(std::isnan(y[i]));
    } else {
      CHECK(y[i] == out[i]);
      CHECK(!std::signbit(y[i]));
    }
  }
  // The relative error is at most 2^-22.
  Buffer<float> many("many", 1024), powers("powers", 1024);
  for (std::size_t i = 0; i < 1024; ++i) many[i] = -125.0f + 0.24f * static_cast<float>(i);
  LAUNCH(kernels::ex2_of, 1, 1024, 0, nullptr, many.data(), powers.data());
  for (std::size_t i = 0; i < 1024; ++i) {
    const double exact = std::exp2(static_cast<double>(many[i]));
    CHECK(std::fabs(powers[i] - exact) <= exact * 0x1p-22);
  }
}

TEST_CASE("dp4a.s32.s32") {
  // "d = c; for i in 0..3: d += Va[i] * Vb[i]", on sign-extended bytes, modulo 2^32.
  const std::vector<int> a{0x01020304, static_cast<int>(0x80808080u), static_cast<int>(0x80ff7f01u),
                           0x7f7f7f7f},
      b{0x01010101, static_cast<int>(0x80808080u), 0x7f02807f, 0x7f7f7f7f},
      c{100, -1, 0, std::numeric_limits<int>::max()};
  const std::vector<int> d{110, 4 * 16384 - 1, -128 * 127 + -1 * 2 + 127 * -128 + 1 * 127,
                           static_cast<int>(0x7fffffffu + 4u * 16129u)};
  Buffer<int> a_device("a", a), b_device("b", b), c_device("c", c), y("y", 4);
  LAUNCH(kernels::dp4a_of, 1, 4, 0, nullptr, a_device.data(), b_device.data(), c_device.data(), y.data());
  for (std::size_t i = 0; i < 4; ++i) CHECK(y[i] == d[i]);
}

TEST_CASE("shfl.sync, vote.sync and reductions") {
  in_every_order([] {
    for (const int width : {32, 16, 4}) {
      for (const int operand : {0, 1, 3, 7, 16, 31}) {
        CAPTURE(width);
        CAPTURE(operand);
        Buffer<int> x("x", kLanes), y("y", 6 * kLanes);
        for (std::size_t i = 0; i < kLanes; ++i) x[i] = static_cast<int>(i * 37 % 101);
        LAUNCH(kernels::shuffles_of, 1, 32, 0, nullptr, x.data(), operand, width, y.data());
        // The manual's pseudocode: segmask = clamp's upper bits, maxLane of the segment, j, p.
        unsigned votes = 0;
        for (int lane = 0; lane < 32; ++lane)
          votes |= x[static_cast<std::size_t>(lane)] % 3 == 0 ? 1u << lane : 0;
        for (int lane = 0; lane < 32; ++lane) {
          const int segment_mask = 32 - width, bound = 0x1f & ~segment_mask;
          const int max_lane = (lane & segment_mask) | bound, min_lane = lane & segment_mask;
          const auto value = [&](int j, bool p) { return x[static_cast<std::size_t>(p ? j : lane)]; };
          const auto found = [&](int k) { return y[static_cast<std::size_t>(6 * lane + k)]; };
          const int index = min_lane | (operand & ~segment_mask & 0x1f);
          CHECK(found(0) == value(index, index <= max_lane));
          CHECK(found(1) == value(lane ^ operand, (lane ^ operand) <= max_lane));
          CHECK(found(2) == value(lane - operand, lane - operand >= min_lane));
          CHECK(found(3) == value(lane + operand, lane + operand <= max_lane));
          CHECK(static_cast<unsigned>(found(4)) == votes);
          int most = 0;
          for (int i = lane / 8 * 8; i < lane / 8 * 8 + 8; ++i)
            most = std::max(most, x[static_cast<std::size_t>(i)]);
          CHECK(found(5) == most);
        }
      }
    }
  });
}

TEST_CASE("votes of half a warp") {
  in_every_order([] {
    Buffer<int> x("x", kLanes), y("y", 3 * kLanes);
    for (std::size_t i = 0; i < kLanes; ++i) x[i] = i % 2 == 0 ? 1 : 2;
    LAUNCH(kernels::votes_of, 1, 32, 0, nullptr, x.data(), y.data());
    for (std::size_t i = 0; i < kLanes; ++i) {
      CHECK(static_cast<unsigned>(y[3 * i]) == (i < 16 ? 0x0000ffffu : 0xaaaa0000u));
      CHECK(y[3 * i + 1] == 0);  // none above 2
      CHECK(y[3 * i + 2] == 1);  // all above 0
    }
  });
}

TEST_CASE("halves round once, to nearest even") {
  const auto h = [](float x) { return __float2half(x); };
  CHECK(__half2float(h(2049.0f)) == 2048.0f);
  CHECK(__half2float(h(2051.0f)) == 2052.0f);
  CHECK(__half2float(h(65519.0f)) == 65504.0f);
  CHECK(std::isinf(__half2float(h(65520.0f))));
  CHECK(__half2float(h(0x1p-24f)) == 0x1p-24f);  // subnormal halves are kept
  CHECK(__half2float(__hadd(h(2048.0f), h(1.0f))) == 2048.0f);
  CHECK(__half2float(__hsub(h(1152.0f), h(1024.0f))) == 128.0f);
  CHECK(__half2float(__hmul(h(3.0f), h(683.0f))) == 2048.0f);           // 2049
  CHECK(__half2float(__hfma(h(3.0f), h(683.0f), h(1.0f))) == 2050.0f);  // no rounding of the product
  CHECK(__half_as_ushort(__ushort_as_half(0x6480)) == 0x6480);
  CHECK(__half2float(__ushort_as_half(0x6480)) == 1152.0f);
}

TEST_CASE("__byte_perm") {
  const unsigned x = 0x33221100, y = 0xf7665544;
  CHECK(__byte_perm(x, y, 0x3210) == x);
  CHECK(__byte_perm(x, y, 0x7654) == y);
  CHECK(__byte_perm(x, y, 0x5140) == 0x55114400);
  CHECK(__byte_perm(x, 0x64646464u, 0x4342) == 0x64336422);
  CHECK(__byte_perm(x, y, 0xfb80) == 0xff000000);  // signs
}

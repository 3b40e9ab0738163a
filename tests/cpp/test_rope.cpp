// RoPE: angles, scalings, and which elements turn.
#include "model/rope.h"

#include <doctest/doctest.h>

#include <cmath>
#include <numbers>
#include <utility>
#include <vector>

using namespace ringlm;

TEST_CASE("RoPE angles hold at a position of a million") {
  Rope rope;
  rope.scaling = RopeScaling::Linear;
  rope.base = 500000.0;
  rope.factor = 8.0;
  const RopeAngles angles = rope_angles(rope, 64, 0);
  REQUIRE(angles.frequencies.size() == 32);
  std::vector<float> table(64);
  for (const std::int64_t position : {0LL, 1LL, 4095LL, 999999LL, 1000000LL, 16000000LL}) {
    rope_table(angles, position, table);
    for (std::size_t i = 0; i < 32; ++i) {
      const long double angle = static_cast<long double>(position) / 8.0L *
                                std::pow(500000.0L, -2.0L * static_cast<long double>(i) / 64.0L);
      REQUIRE(std::fabs(static_cast<double>(table[2 * i] - std::cos(angle))) < 1e-7);
      REQUIRE(std::fabs(static_cast<double>(table[2 * i + 1] - std::sin(angle))) < 1e-7);
    }
  }
}

TEST_CASE("RoPE factors divide frequencies, and pairs turn as told") {
  Rope rope;
  rope.base = 100.0;
  rope.factors = {1.0f, 4.0f};
  const std::vector<double> frequencies = rope_angles(rope, 4, 0).frequencies;
  CHECK(frequencies[0] == doctest::Approx(1.0));
  CHECK(frequencies[1] == doctest::Approx(0.1 / 4));

  const double quarter = std::numbers::pi / 2;
  std::vector<float> table(4);
  rope_table({{quarter, 2 * quarter}, 1.0}, 1, table);
  std::vector<float> head = {1, 2, 3, 4, 9};
  rope_apply(head, table, RopePairing::Interleaved);  // (1, 2) by a quarter turn, (3, 4) by a half
  const std::vector<float> interleaved = {-2, 1, -3, -4, 9};
  for (std::size_t i = 0; i < 5; ++i) CHECK(head[i] == doctest::Approx(interleaved[i]));
  head = {1, 2, 3, 4, 9};
  rope_apply(head, table, RopePairing::Halves);  // (1, 3) by a quarter turn, (2, 4) by a half
  const std::vector<float> halves = {-3, -2, 1, -4, 9};
  for (std::size_t i = 0; i < 5; ++i) CHECK(head[i] == doctest::Approx(halves[i]));
}

TEST_CASE("angles that depend on the length of the text come in regimes") {
  Config c;
  c.rope_dims = 8;
  c.ropes = {Rope{}};
  c.n_ctx_limit = 4096;
  CHECK(Ropes(c).regime(4096) == 0);

  Rope& rope = c.ropes[0];
  rope.scaling = RopeScaling::LongRope;
  rope.original = 100.0;
  rope.factors = {1, 1, 1, 1};
  rope.long_factors = {1, 2, 3, 4};
  const Ropes two(c);
  CHECK(two.regime(0) == 0);
  CHECK(two.regime(100) == 0);
  CHECK(two.regime(101) == 1);
  CHECK(two.regime(4096) == 1);
  CHECK(two.at(0, 0).frequencies[3] == doctest::Approx(4.0 * two.at(0, 1).frequencies[3]));

  rope.scaling = RopeScaling::DynamicNtk;
  rope.factor = 8.0;
  rope.factors = rope.long_factors = {};
  c.n_ctx_limit = 800;
  const Ropes doubling(c);
  for (const auto& [length, regime] : {std::pair{100, 0}, {101, 1}, {200, 1}, {201, 2}, {400, 2}, {800, 3}}) {
    CHECK(doubling.regime(length) == regime);
    // base * (factor n / original - (factor - 1))^(d / (d - 2)), n the longest text of the regime
    const double n = 100 << regime, base = 10000.0 * std::pow(8.0 * n / 100 - 7.0, 8.0 / 6.0);
    CHECK(doubling.at(0, regime).frequencies[3] ==
          doctest::Approx(std::pow(regime == 0 ? 10000.0 : base, -6.0 / 8.0)));
  }
}

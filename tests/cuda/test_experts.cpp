// route against choose_experts of ops/route.cpp, mix_experts against float64.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "cuda/launch.h"
#include "ops/ops.h"
#include "simt/helpers.h"

using namespace ringlm;
using simt::Buffer;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInf = HUGE_VALF;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> random_floats(std::int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(size(n));
  for (float& v : values) v = normal(random);
  return values;
}

struct Case {
  int M, n_expert, n_used;
  bool normalize, shared;
};

void check_route(const Case& r, const std::vector<float>& scores, const std::vector<float>& shared) {
  Config c;
  c.n_expert = r.n_expert, c.n_expert_used = r.n_used, c.n_ff_shared = r.shared ? 32 : 0;
  c.expert_weights_norm = r.normalize;
  const std::size_t M = size(r.M), used = size(r.n_used), n_slots = size(c.n_slots());
  std::vector<std::int32_t> experts(M * used);
  std::vector<float> weights(M * n_slots);
  std::vector<Row> rows(M);
  Activations a;
  a.routing.experts = experts;
  a.routing.weights = weights;
  for (std::size_t m = 0; m < M; ++m) {
    choose_experts(c, {rows, a, {}}, m, std::span(scores).subspan(m * size(r.n_expert), size(r.n_expert)),
                   shared[m]);
  }
  simt::in_every_order([&] {
    Buffer<float> scores_("scores", scores), shared_("shared", shared), weights_("weights", M * n_slots);
    Buffer<std::int32_t> experts_("experts", M * used);
    cuda::route({scores_.data(), r.shared ? shared_.data() : nullptr, r.M, r.n_expert, r.n_used, r.normalize,
                 experts_.data(), weights_.data()},
                nullptr);
    CHECK(std::equal(experts.begin(), experts.end(), experts_.begin()));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (std::isnan(weights[i])) {
        CHECK(std::isnan(weights_[i]));
      } else {
        CHECK(std::fabs(weights_[i] - weights[i]) <= 2e-6f * weights[i]);
      }
    }
    CHECK(simt::report().bypasses == 0);
  });
}

}  // namespace

TEST_CASE("route chooses as choose_experts does") {
  for (const Case r :
       {Case{5, 8, 2, true, false}, Case{3, 60, 4, false, true}, Case{2, 128, 8, true, true},
        Case{2, 512, 40, true, false}, Case{2, 33, 33, false, true}, Case{3, 1, 1, true, false}}) {
    CAPTURE(r.n_expert);
    std::vector<float> scores = random_floats(r.M * r.n_expert, 1);
    for (float& s : scores) s = std::round(s * 8.0f) / 4.0f;  // many equal ones
    check_route(r, scores, random_floats(r.M, 2));
  }
}

TEST_CASE("route: both zeros are equal, minus infinity is no choice before any other") {
  check_route({1, 6, 4, true, false}, {0.0f, -0.0f, -kInf, -0.0f, 0.0f, -kInf}, {0.0f});
  check_route({1, 3, 3, true, true}, {-kInf, 700.0f, -kInf}, {120.0f});
}

TEST_CASE("route: with a score that is no number the weights are none, the experts different ones") {
  for (const float bad : {kNaN, -kNaN, kInf}) {
    for (const std::size_t at : {0u, 5u, 39u}) {
      std::vector<float> scores = random_floats(3 * 40, 3);
      scores[40 + at] = bad;
      check_route({3, 40, 6, true, true}, scores, {1.0f, 2.0f, kNaN});
    }
  }
  check_route({1, 4, 2, false, true}, {-kInf, -kInf, -kInf, -kInf}, {1.0f});
}

TEST_CASE("mix_experts") {
  for (const int cols : {64, 130, 1028}) {
    for (const bool with_shared : {false, true}) {
      CAPTURE(cols);
      constexpr int kRows = 3, kUsed = 5;
      const int n_slots = kUsed + (with_shared ? 1 : 0);
      const std::vector<float> from = random_floats(kRows * kUsed * cols, 4),
                               shared = random_floats(kRows * cols, 5);
      std::vector<float> weights = random_floats(kRows * n_slots, 6);
      weights[size(2 * n_slots + 1)] = kNaN;
      simt::in_every_order([&] {
        Buffer<float> from_("from", from), shared_("shared", shared), weights_("weights", weights),
            y("y", size(kRows * cols));
        cuda::mix_experts(from_.data(), with_shared ? shared_.data() : nullptr, weights_.data(), kRows, kUsed,
                          cols, y.data(), nullptr);
        double worst = 0.0;
        for (int i = 0; i < kRows * cols; ++i) {
          const int m = i / cols;
          double sum = 0.0;
          for (int j = 0; j < kUsed; ++j) {
            sum += double{weights[size(m * n_slots + j)]} * from[size((m * kUsed + j) * cols + i % cols)];
          }
          if (with_shared) sum += double{weights[size(m * n_slots + kUsed)]} * shared[size(i)];
          if (m == 2) {
            CHECK(std::isnan(y[size(i)]));
          } else {
            worst = simt::larger(worst, std::fabs(y[size(i)] - sum));
          }
        }
        CHECK(worst < 3e-6);
        CHECK(simt::report().bypasses == 0);
      });
    }
  }
}

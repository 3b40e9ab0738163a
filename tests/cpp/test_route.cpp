// Which experts tokens go to, the slots that they get, and that those fit into the buffers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "cpu/products.h"
#include "kernel_tests.h"
#include "ops/ops.h"

using namespace ringlm;

namespace {

// A step of M rows with nothing in it but its routing.
struct Routed {
  Config c;
  std::vector<Row> rows;
  std::vector<std::int32_t> experts, slots, first;
  std::vector<float> weights;
  Activations a;

  Routed(std::int32_t n_expert, std::int32_t used, std::int32_t n_ff_shared, std::int64_t M) {
    c.n_expert = n_expert, c.n_expert_used = used, c.n_ff_shared = n_ff_shared;
    c.n_ff_expert = 32;
    rows.resize(size(M));
    experts.resize(size(M * used));
    weights.resize(size(M * c.n_slots()));
    slots.resize(size(M * c.n_slots()), -1);
    first.resize(size(n_expert) + 1);
    a.routing = {{}, experts, weights, slots, first};
  }
  Step step() { return {rows, a, {}}; }
};

}  // namespace

TEST_CASE("the experts of the largest probability, the first of equal ones") {
  for (const bool norm : {false, true}) {
    for (const std::int32_t used : {1, 2, 5, 8}) {
      Routed r(8, used, 0, 1);
      r.c.expert_weights_norm = norm;
      std::vector<float> scores = random_floats(8, 3, 4.0f);
      scores[6] = scores[1];  // a tie
      scores[3] = -kInf;
      choose_experts(r.c, r.step(), 0, scores, 0.0f);

      std::vector<std::int32_t> order(8);
      std::iota(order.begin(), order.end(), 0);
      std::ranges::stable_sort(order, [&](int x, int y) { return scores[size(x)] > scores[size(y)]; });
      double total = 0.0, chosen = 0.0;
      for (const float s : scores) total += std::exp(static_cast<double>(s));
      for (std::int32_t i = 0; i < used; ++i)
        chosen += std::exp(double{scores[size(order[size(i)])]}) / total;
      for (std::int32_t i = 0; i < used; ++i) {
        CHECK(r.experts[size(i)] == order[size(i)]);
        const double p = std::exp(double{scores[size(order[size(i)])]}) / total;
        CHECK(r.weights[size(i)] == doctest::Approx(norm ? p / chosen : p));
      }
    }
  }
}

TEST_CASE("the shared expert has the last weight, a sigmoid") {
  Routed r(4, 2, 64, 1);
  choose_experts(r.c, r.step(), 0, std::vector<float>{1, 2, 3, 4}, -1.5f);
  CHECK(r.weights[2] == doctest::Approx(1.0 / (1.0 + std::exp(1.5))));
}

TEST_CASE("a score that is no number makes every weight one that is none, and no expert is taken twice") {
  for (const float bad : {kNaN, kInf}) {
    for (std::size_t at = 0; at < 5; ++at) {
      for (const std::int32_t used : {1, 3, 5}) {
        Routed r(5, used, 32, 1);
        std::vector<float> scores = {1, 0, 2, -1, 0.5f};
        scores[at] = bad;
        if (at == 2) scores[3] = bad;
        choose_experts(r.c, r.step(), 0, scores, 0.0f);
        CHECK(std::ranges::all_of(r.weights, [](float w) { return std::isnan(w); }));
        CHECK(std::set<std::int32_t>(r.experts.begin(), r.experts.end()).size() == size(used));
        CHECK(std::ranges::all_of(r.experts, [](std::int32_t e) { return 0 <= e && e < 5; }));
      }
    }
  }
}

TEST_CASE(
    "slots of an expert follow one another in ascending row, and fit where their inputs are quantized") {
  tiny::Random random(5);
  for (const std::int64_t M : {1, 2, 15, 16, 17, 128}) {
    for (const auto& [n_expert, used] : {std::pair{4, 2}, {8, 8}, {64, 4}, {300, 3}}) {
      for (const std::int32_t n_ff_shared : {0, 96}) {
        Routed r(n_expert, used, n_ff_shared, M);
        r.c.n_embd = 64;
        for (std::size_t m = 0; m < size(M); ++m) {
          std::vector<float> scores(size(n_expert));
          for (float& s : scores) s = random();
          if (m % 3 == 0) scores[0] = 100.0f;  // some experts get many
          choose_experts(r.c, r.step(), m, scores, 0.0f);
        }
        assign_slots(r.c, r.step());

        LayerWeights w;
        w.experts.resize(size(n_expert) + (n_ff_shared > 0 ? 1 : 0));
        std::vector<std::int64_t> owner(size(M * r.c.n_slots()), -1);  // the expert of each slot
        std::int64_t next = 0;
        std::size_t gate_end = 0, by_embd = 0, by_ff = 0;
        for_each_run(r.c, w, r.step(), [&](const ExpertRun& run) {
          CHECK(run.first == next);
          CHECK(run.gate == gate_end);
          next += run.n;
          gate_end += size(run.n * run.n_ff);
          by_embd += cpu::run_bytes(r.c.n_embd, run.n);
          by_ff += cpu::run_bytes(run.n_ff, run.n);
          for (std::int64_t j = run.first; j < next; ++j) owner[size(j)] = &run.network - w.experts.data();
        });
        CHECK(next == M * r.c.n_slots());
        CHECK(gate_end == size(M * (used * r.c.n_ff_expert + n_ff_shared)));
        CHECK(by_embd <= cpu::Products::most_bytes(r.c, M));
        CHECK(by_ff <= cpu::Products::most_bytes(r.c, M));

        for (std::int64_t m = 0; m < M; ++m) {
          for (std::int32_t i = 0; i < r.c.n_slots(); ++i) {
            const std::int32_t slot = r.slots[size(m * r.c.n_slots() + i)];
            const std::int64_t expert = i < used ? r.experts[size(m * used + i)] : n_expert;
            REQUIRE(owner[size(slot)] == expert);
          }
        }
        CHECK(std::set<std::int32_t>(r.slots.begin(), r.slots.end()).size() == r.slots.size());
      }
    }
  }
}

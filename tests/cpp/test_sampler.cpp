#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "decoder/sampler_math.h"
#include "ringlm/error.h"
#include "ringlm/sampler.h"

using namespace ringlm;

namespace {

std::size_t n_allocations = 0;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Everything off: the draw follows the softmax.
SamplerParams plain(double temperature = 1.0) {
  SamplerParams p;
  p.temperature = temperature;
  p.top_k = 0;
  p.top_p = 1;
  p.min_p = 0;
  return p;
}

std::vector<float> normal_logits(std::size_t n, float scale, unsigned seed = 1) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> d;
  std::vector<float> x(n);
  for (float& v : x) v = scale * d(gen);
  return x;
}

std::vector<std::int32_t> draws(Sampler& s, const std::vector<float>& logits, int n) {
  std::vector<std::int32_t> out;
  for (int i = 0; i < n; ++i) out.push_back(s.sample(logits));
  return out;
}

std::set<std::int32_t> support(SamplerParams p, const std::vector<float>& logits, int n) {
  p.temperature = 1e9;  // even among what is kept
  Sampler s(static_cast<std::int32_t>(logits.size()), p);
  const auto tokens = draws(s, logits, n);
  return {tokens.begin(), tokens.end()};
}

template <class E, class F>
std::string message(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing thrown";
}

bool contains(const std::string& s, const std::string& part) { return s.find(part) != std::string::npos; }

}  // namespace

// Counts what the program allocates. Not inline, or g++ takes malloc and free for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t n) {
  ++n_allocations;
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
  ++n_allocations;
  return std::malloc(n ? n : 1);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

TEST_CASE("exp2 is within 1.25 ulp and never denormal") {
  double worst = 0;
  const std::uint32_t end = std::bit_cast<std::uint32_t>(126.0f);
  for (std::uint32_t bits = 0; bits <= end; bits += 1009) {
    const float y = -std::bit_cast<float>(bits);
    const float got = detail::exp2_nonpositive(detail::splat(y))[0];
    const double want = std::exp2(static_cast<double>(y));
    const float ulp = std::nextafter(static_cast<float>(want), 2.0f) - static_cast<float>(want);
    worst = std::max(worst, std::abs(static_cast<double>(got) - want) / static_cast<double>(ulp));
  }
  CHECK(worst <= 1.25);
  for (const float y : {-126.0f, -127.0f, -1e30f, -kInf, kNan}) {
    CHECK(detail::exp2_nonpositive(detail::splat(y))[2] == 0x1p-126f);
  }
  CHECK(detail::exp2_nonpositive(detail::splat(0.0f))[1] == 1.0f);
}

TEST_CASE("log_positive agrees with the C library") {
  CHECK(detail::log_positive(1.0) == 0.0);
  std::mt19937_64 gen(3);
  std::uniform_real_distribution<double> exponent(-1070, 1000);
  for (int i = 0; i < 20000; ++i) {
    const double x = std::exp2(exponent(gen) / (1 << (i % 10)));
    const double want = std::log(x);
    CHECK(std::abs(detail::log_positive(x) - want) <= 4e-16 * std::max(std::abs(want), 1e-3));
  }
}

TEST_CASE("random numbers are xoshiro256++ seeded by SplitMix64") {
  // Outputs of the authors' C code, as other implementations publish them for their tests.
  detail::Rng rng({1, 2, 3, 4});
  for (const std::uint64_t want : {41943041u, 58720359u}) {
    CHECK(rng.next() == want);
  }
  for (const std::uint64_t want :
       {3588806011781223u, 3591011842654386u, 9228616714210784205u, 9973669472204895162u}) {
    CHECK(rng.next() == want);
  }
  detail::Rng seeded(0);
  detail::Rng same({0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4, 0x06c45d188009454f, 0xf88bb8a8724c81ec});
  for (int i = 0; i < 10; ++i) CHECK(seeded.next() == same.next());

  detail::Rng uniform(7);
  double sum = 0, squares = 0;
  const int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double u = uniform.uniform();
    REQUIRE((u >= 0 && u < 1));
    sum += u;
    squares += u * u;
  }
  CHECK(sum / n == doctest::Approx(0.5).epsilon(0.005));
  CHECK(squares / n == doctest::Approx(1.0 / 3).epsilon(0.01));
}

TEST_CASE("parameters out of range are named with their value") {
  const auto error = [](auto change, std::int32_t n_vocab = 10) {
    SamplerParams p;
    change(p);
    return message<InvalidArgument>([&] { Sampler(n_vocab, p); });
  };
  const auto none = [](SamplerParams&) {};
  CHECK(contains(error(none, 0), "n_vocab is 0"));
  CHECK(contains(error(none, -3), "n_vocab is -3"));
  for (const double bad : {-0.5, static_cast<double>(kNan), static_cast<double>(kInf)}) {
    CHECK(contains(error([=](SamplerParams& p) { p.temperature = bad; }), "temperature is "));
  }
  CHECK(contains(error([](SamplerParams& p) { p.top_k = -1; }), "top_k is -1; expected at least 0"));
  for (const double bad : {-0.25, 1.25, static_cast<double>(kNan)}) {
    CHECK(contains(error([=](SamplerParams& p) { p.top_p = bad; }), "top_p is "));
    CHECK(contains(error([=](SamplerParams& p) { p.min_p = bad; }), "min_p is "));
  }
  CHECK(contains(error([](SamplerParams& p) { p.top_p = 1.25; }), "1.25; expected 0 to 1"));
  for (const double bad : {0.0, -1.0, static_cast<double>(kNan), static_cast<double>(kInf)}) {
    CHECK(contains(error([=](SamplerParams& p) { p.repetition_penalty = bad; }), "repetition_penalty is "));
  }
  CHECK(contains(error([](SamplerParams& p) { p.presence_penalty = kNan; }), "presence_penalty is nan"));
  CHECK(contains(error([](SamplerParams& p) { p.frequency_penalty = -kInf; }), "frequency_penalty is -inf"));
  CHECK(contains(error([](SamplerParams& p) { p.penalty_window = -1; }), "penalty_window is -1"));
  CHECK(contains(error([](SamplerParams& p) { p.penalty_window = 1 << 21; }), "penalty_window is 2097152"));
  CHECK(contains(error([](SamplerParams& p) { p.logit_bias = {{10, 1.0}}; }), "logit_bias[10]"));
  CHECK(contains(error([](SamplerParams& p) { p.logit_bias = {{-1, 1.0}}; }), "logit_bias[-1]"));
  CHECK(contains(error([](SamplerParams& p) { p.logit_bias = {{3, kNan}}; }), "logit_bias[3] is nan"));
  CHECK(contains(error([](SamplerParams& p) { p.logit_bias = {{3, kInf}}; }), "logit_bias[3] is inf"));
  CHECK(contains(error([](SamplerParams& p) { p.logit_bias = {{0, -kInf}, {1, -kInf}, {0, -kInf}}; }, 2),
                 "bans all 2 tokens"));
  CHECK(error([](SamplerParams& p) { p.logit_bias = {{0, -kInf}, {0, -kInf}}; }, 2) == "nothing thrown");
}

TEST_CASE("an error leaves the random state and the window as before") {
  SamplerParams p = plain();
  p.frequency_penalty = 0.5;
  p.penalty_window = 5;
  const auto logits = normal_logits(700, 1);
  Sampler s(700, p), untouched(700, p);
  const std::vector<std::int32_t> start{1, 2, 3};
  s.accept(start);
  untouched.accept(start);
  for (const float value : {kNan, kInf, -kInf}) {
    for (const std::size_t index : {0u, 255u, 256u, 699u}) {
      auto bad = logits;
      bad[index] = value;
      bad[699] = value;
      const std::string what = message<NumericError>([&] { s.sample(bad); });
      CHECK(contains(what, "logit " + std::to_string(index) + " is "));
    }
  }
  CHECK(contains(message<InvalidArgument>([&] { s.sample(std::span(logits).first(699)); }),
                 "699 logits; expected 700"));
  CHECK(contains(message<InvalidArgument>([&] { s.accept(std::vector<std::int32_t>{4, 700}); }),
                 "token 1 is 700; expected an id from 0 to 699"));
  CHECK(contains(message<InvalidArgument>([&] { s.accept(std::vector<std::int32_t>{-1}); }), "is -1"));
  CHECK(draws(s, logits, 50) == draws(untouched, logits, 50));
}

TEST_CASE("a seed repeats, reset goes back, copies continue alike and apart") {
  SamplerParams p;
  p.seed = 42;
  p.presence_penalty = 1;
  const auto logits = normal_logits(1000, 2);
  Sampler a(1000, p), b(1000, p);
  const auto tokens = draws(a, logits, 100);
  CHECK(draws(b, logits, 100) == tokens);
  a.reset();
  CHECK(draws(a, logits, 100) == tokens);
  Sampler copy(a);
  const auto next = draws(a, logits, 20);
  CHECK(draws(copy, logits, 20) == next);
  Sampler assigned(3, SamplerParams{});
  assigned = b;
  CHECK(assigned.n_vocab() == 1000);
  CHECK(draws(assigned, logits, 20) == next);
  Sampler moved(std::move(b));
  CHECK(draws(moved, logits, 20) == next);
  p.seed = 43;
  Sampler other(1000, p);
  CHECK(draws(other, logits, 100) != tokens);
}

TEST_CASE("sampling allocates nothing") {
  const std::size_t n = 5000;
  const auto logits = normal_logits(n, 2);
  const std::vector<float> equal(n, 1.0f);
  std::vector<SamplerParams> settings(6, plain());
  settings[1].temperature = 0;
  settings[2].top_k = 40;
  settings[3].top_p = 0.9;
  settings[4] = {};
  settings[4].repetition_penalty = 1.2;
  settings[4].logit_bias = {{3, -kInf}, {4, 2.0}};
  settings[5].top_k = 4000;
  settings[5].min_p = 0.01;
  const std::vector<std::int32_t> prompt{1, 2, 3};
  std::vector<std::int32_t> few(64);
  std::iota(few.begin(), few.end(), 0);
  for (const SamplerParams& p : settings) {
    Sampler s(static_cast<std::int32_t>(n), p);
    const std::size_t before = n_allocations;
    for (int i = 0; i < 20; ++i) {
      s.accept(prompt);
      s.sample(logits);
      s.sample(equal);
      if (s.n_needed() <= 64) s.sample(few, std::span(logits).first(64));
    }
    s.reset();
    CHECK(n_allocations == before);
  }
  CHECK(n_allocations > 0);
}

// The largest k logits of a row and their ids, the largest first, of equals the lower id.
std::pair<std::vector<std::int32_t>, std::vector<float>> largest(const std::vector<float>& x, std::size_t k) {
  std::vector<std::int32_t> ids(x.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto at = [&](std::int32_t id) { return x[static_cast<std::size_t>(id)]; };
  std::ranges::stable_sort(ids, std::greater<>(), at);
  ids.resize(std::min(k, x.size()));
  std::vector<float> logits(ids.size());
  std::ranges::transform(ids, logits.begin(), at);
  return {ids, logits};
}

TEST_CASE("a draw from the largest logits is the draw from all of them") {
  std::vector<SamplerParams> settings(1, plain(0));
  for (const std::int32_t k : {1, 2, 5, 40, 63, 64}) {
    SamplerParams p = plain(k == 2 ? 0.3 : 1.7);
    p.top_k = k;
    settings.push_back(p);
    p.top_p = 0.8, p.min_p = 0.02;
    settings.push_back(p);
    p.top_p = 0.999, p.min_p = 0.3;
    settings.push_back(p);
  }
  for (const std::size_t n : {65, 256, 257, 5000, 40'003}) {
    std::vector<float> equal(n, 1.0f), steps(n);
    for (std::size_t i = 0; i < n; ++i)
      steps[i] = static_cast<float>(i % 7) * -0.0f + static_cast<float>(i % 3);
    for (const auto& logits :
         {normal_logits(n, 0.1f), normal_logits(n, 3), normal_logits(n, 30), equal, steps}) {
      for (const SamplerParams& p : settings) {
        CAPTURE(n);
        CAPTURE(p.top_k);
        CAPTURE(p.top_p);
        Sampler all(static_cast<std::int32_t>(n), p), few(all);
        REQUIRE(all.n_needed() == (p.temperature == 0 ? 1 : p.top_k));
        for (const auto& given :
             {largest(logits, 64), largest(logits, static_cast<std::size_t>(all.n_needed()))}) {
          for (int i = 0; i < 20; ++i) CHECK(all.sample(logits) == few.sample(given.first, given.second));
        }
        const std::vector<float> other = normal_logits(n, 1, 2);  // nothing of the former is left
        const auto [ids, values] = largest(other, 64);
        CHECK(all.sample(other) == few.sample(ids, values));
      }
    }
  }
}

TEST_CASE("what needs all logits says so") {
  const auto needed = [](auto change) {
    SamplerParams p = plain();
    p.top_k = 40;
    change(p);
    return Sampler(1000, p).n_needed();
  };
  CHECK(needed([](SamplerParams&) {}) == 40);
  CHECK(needed([](SamplerParams& p) { p.top_k = 64; }) == 64);
  CHECK(needed([](SamplerParams& p) { p.top_k = 65; }) == 1000);
  CHECK(needed([](SamplerParams& p) { p.top_k = 0; }) == 1000);
  CHECK(needed([](SamplerParams& p) { p.temperature = 0, p.top_k = 0; }) == 1);
  CHECK(needed([](SamplerParams& p) { p.temperature = 0, p.logit_bias = {{3, 1.0}}; }) == 1000);
  CHECK(needed([](SamplerParams& p) { p.repetition_penalty = 1.1; }) == 1000);
  CHECK(needed([](SamplerParams& p) { p.repetition_penalty = 1.1, p.penalty_window = 0; }) == 40);

  SamplerParams p = plain();
  p.top_k = 2;
  Sampler s(1000, p), before(s);
  const std::vector<float> logits = normal_logits(1000, 1), two{1, 1}, bad{1, kNan};
  const std::vector<std::int32_t> one_id{7}, ids{7, 9}, unknown{7, 1000};
  const auto refused = [&](std::span<const std::int32_t> of, std::span<const float> x, const char* part) {
    return contains(message<InvalidArgument>([&] { s.sample(of, x); }), part);
  };
  CHECK(refused(one_id, std::span(two).first(1), "1 ids and 1 logits; expected as many of each, at least 2"));
  CHECK(refused(ids, std::span(two).first(1), "2 ids and 1 logits"));
  CHECK(refused(unknown, two, "id 1 is 1000; expected 0 to 999"));
  CHECK(contains(message<NumericError>([&] { s.sample(ids, bad); }), "logit 9 is nan"));
  CHECK(s.sample(logits) == before.sample(logits));
  p.top_k = 0;
  CHECK(contains(message<InvalidArgument>([&] { Sampler(1000, p).sample(ids, two); }),
                 "depends on all logits"));
}

TEST_CASE("temperature 0 takes the largest adjusted logit, the lower id of equals") {
  std::vector<float> x(600, -2.0f);
  x[300] = x[520] = 3.0f;
  SamplerParams p = plain(0);
  CHECK(Sampler(600, p).sample(x) == 300);
  p.logit_bias = {{300, -0.5}};
  CHECK(Sampler(600, p).sample(x) == 520);
  p.logit_bias = {{300, -kInf}, {520, -kInf}, {599, 0.25}};
  CHECK(Sampler(600, p).sample(x) == 599);
  CHECK(Sampler(1, plain(0)).sample(std::vector<float>{-5.0f}) == 0);
  x[7] = -0.0f;
  x[9] = 0.0f;
  x[300] = x[520] = -1;
  CHECK(Sampler(600, plain(0)).sample(x) == 7);  // the zeros are equal
}

TEST_CASE("penalties follow the window exactly") {
  // Against a deque and counts made anew at each step.
  const std::int32_t n_vocab = 12;
  std::mt19937 gen(5);
  for (const std::int32_t window : {0, 1, 2, 7, 64}) {
    SamplerParams p = plain(0);
    p.repetition_penalty = 1.3;
    p.presence_penalty = 0.2;
    p.frequency_penalty = 0.15;
    p.penalty_window = window;
    p.logit_bias = {{2, 0.7}, {5, -0.4}};
    Sampler s(n_vocab, p);
    std::deque<std::int32_t> recent;
    const auto enter = [&](std::int32_t t) {
      recent.push_back(t);
      while (recent.size() > static_cast<std::size_t>(window)) recent.pop_front();
    };
    for (int step = 0; step < 300; ++step) {
      if (step % 50 == 10) {
        const std::vector<std::int32_t> text{3, 3, 3, 8, static_cast<std::int32_t>(gen() % 12)};
        s.accept(text);
        for (const auto t : text) enter(t);
      }
      const auto logits = normal_logits(static_cast<std::size_t>(n_vocab), 1, gen());
      std::map<std::int32_t, int> counts;
      for (const auto t : recent) ++counts[t];
      std::vector<double> x(logits.begin(), logits.end());
      x[2] += 0.7;
      x[5] -= 0.4;
      for (const auto& [t, count] : counts) {
        double& v = x[static_cast<std::size_t>(t)];
        v = v > 0 ? v / 1.3 : v * 1.3;
        v -= 0.2 + 0.15 * count;
      }
      const auto want = static_cast<std::int32_t>(std::max_element(x.begin(), x.end()) - x.begin());
      REQUIRE(s.sample(logits) == want);
      enter(want);
    }
  }
}

TEST_CASE("extreme logits, temperatures and penalties stay finite") {
  const float huge = std::numeric_limits<float>::max();
  for (const float scale : {huge, 1e30f, 1e-30f, 1e-44f}) {
    std::vector<float> x{scale, -scale, 0.0f, scale, -scale / 2};
    for (const double t : {1e-300, 1e-40, 1e-10, 1.0, 1e10, 1e300}) {
      for (const std::int32_t k : {0, 1, 3}) {
        SamplerParams p = plain(t);
        p.top_k = k;
        p.top_p = 0.9;
        p.repetition_penalty = 1e30;
        p.penalty_window = 3;
        Sampler s(5, p);
        for (int i = 0; i < 20; ++i) {
          const std::int32_t id = s.sample(x);
          CHECK((id >= 0 && id < 5));
        }
      }
    }
  }
  SamplerParams opposed = plain();
  opposed.repetition_penalty = 1e300;
  opposed.presence_penalty = -1e308;
  opposed.frequency_penalty = -1e308;
  Sampler finite(3, opposed);
  for (int i = 0; i < 20; ++i) CHECK(finite.sample(std::vector<float>{huge, -huge, 0}) < 3);
  // At a small temperature only the largest are left, and equals share.
  const std::vector<float> x{1, 1 - 1e-6f, 1, -1};
  Sampler s(4, plain(1e-12));
  const auto tokens = draws(s, x, 200);
  CHECK(std::set<std::int32_t>(tokens.begin(), tokens.end()) == std::set<std::int32_t>{0, 2});
}

TEST_CASE("truncation at its limits") {
  std::vector<float> equal(700, 0.5f);
  SamplerParams p = plain();
  p.top_k = 1;
  CHECK(support(p, equal, 50) == std::set<std::int32_t>{0});
  p.top_k = 3;
  CHECK(support(p, equal, 200) == std::set<std::int32_t>{0, 1, 2});
  p = plain();
  p.top_p = 0;
  CHECK(support(p, equal, 50) == std::set<std::int32_t>{0});
  p.top_p = 1e-300;
  CHECK(support(p, equal, 50) == std::set<std::int32_t>{0});
  p.top_p = 0.01;  // 7 of 700
  CHECK(support(p, equal, 500).size() == 7);
  p = plain();
  p.min_p = 1;
  CHECK(support(p, equal, 20000).size() == 700);
  equal[650] += 1e-6f;
  CHECK(support(p, equal, 50) == std::set<std::int32_t>{650});
  p = plain();
  p.top_k = 600;  // more than there are blocks
  CHECK(support(p, equal, 20000).size() == 600);
  CHECK(!support(p, equal, 20000).contains(600));
  p.top_k = 5;
  p.logit_bias.clear();
  for (std::int32_t id = 0; id < 698; ++id) p.logit_bias.emplace_back(id, -kInf);
  CHECK(support(p, equal, 100) == std::set<std::int32_t>{698, 699});  // fewer left than k
  CHECK(Sampler(1, plain()).sample(std::vector<float>{3.0f}) == 0);
}

TEST_CASE("log-probabilities") {
  auto x = normal_logits(1000, 3);
  x[17] = -kInf;
  x[40] = x[500] = 12.0f;
  double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<double>(v));
  for (const std::int32_t id : {0, 40, 255, 256, 999}) {
    const double want = static_cast<double>(x[static_cast<std::size_t>(id)]) - std::log(sum);
    CHECK(log_probability(x, id) == doctest::Approx(want).epsilon(1e-6));
  }
  CHECK(log_probability(x, 17) == -kInf);
  CHECK(argmax(x) == 40);

  std::vector<std::int32_t> order(1000);
  for (std::int32_t i = 0; i < 1000; ++i) order[static_cast<std::size_t>(i)] = i;
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return x[static_cast<std::size_t>(a)] > x[static_cast<std::size_t>(b)];
  });
  for (const std::int32_t k : {0, 1, 2, 7, 1000, 5000}) {
    const auto top = top_log_probabilities(x, k);
    REQUIRE(top.size() == static_cast<std::size_t>(std::min(k, 1000)));
    for (std::size_t i = 0; i < top.size(); ++i) {
      CHECK(top[i].id == order[i]);
      CHECK(top[i].logprob == log_probability(x, top[i].id));
    }
  }
  // Far apart, and shifted: nothing overflows.
  const std::vector<float> far{1e30f, -1e30f, 1e30f};
  CHECK(log_probability(far, 2) == doctest::Approx(-std::log(2.0)));
  // Nearly certain: the small remainder is not lost.
  const std::vector<float> sure{20.0f, 0.0f};
  CHECK(log_probability(sure, 0) == doctest::Approx(-std::log1p(std::exp(-20.0))).epsilon(1e-4));

  const std::vector<float> empty, masked(3, -kInf), bad{0, kNan, kInf};
  for (const auto& f : {+[](std::span<const float> v) { argmax(v); },
                        +[](std::span<const float> v) { log_probability(v, 0); },
                        +[](std::span<const float> v) { top_log_probabilities(v, 1); }}) {
    CHECK_THROWS_AS(f(empty), InvalidArgument);
    CHECK_THROWS_AS(f(masked), NumericError);
    CHECK(contains(message<NumericError>([&] { f(bad); }), "logit 1 is nan"));
  }
  CHECK(contains(message<InvalidArgument>([&] { log_probability(x, 1000); }), "1000; expected 0 to 999"));
  CHECK_THROWS_AS(log_probability(x, -1), InvalidArgument);
  CHECK_THROWS_AS(top_log_probabilities(x, -1), InvalidArgument);
}

// Sessions on a tiny model: bit-equality, atomic steps, threads, and no allocation after opening.
#include "ringlm/session.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ringlm/error.h"
#include "tiny_model.h"

namespace {
std::atomic<long> allocations{0};
}
// Not inlined: GCC would take malloc and free for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t n) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(n ? n : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

using namespace ringlm;

namespace {

using Logits = std::vector<float>;

std::shared_ptr<const Model> open(const tiny::File& file, int n_threads = 2, const char* backend = "cpu") {
  return Model::open(file.path(), {n_threads, backend});
}

Logits last(const Session& s) { return {s.logits().begin(), s.logits().end()}; }

// Logits behind every token, [n_tokens, n_vocab].
Logits all(Session& s, std::span<const std::int32_t> tokens) {
  Logits out(tokens.size() * static_cast<std::size_t>(s.model()->config().n_vocab));
  s.prefill(tokens, out);
  return out;
}

Logits fresh(const std::shared_ptr<const Model>& model, std::span<const std::int32_t> tokens,
             const SessionOptions& options = {}) {
  Session s(model, options);
  s.prefill(tokens);
  return last(s);
}

}  // namespace

TEST_CASE("the same bits for every chunk, every number of threads, prefill or decode") {
  const tiny::File file;
  const std::vector<std::int32_t> text = tiny::tokens(130);
  for (const KvFormat format : {KvFormat::F16, KvFormat::F32}) {
    SessionOptions options{.k_format = format, .v_format = format};
    Session one(open(file, 1), options);
    const Logits expected = all(one, text);
    for (const int n_threads : {2, 5}) {
      const auto model = open(file, n_threads);
      for (const std::int32_t chunk : {5, 64, 128, 300}) {
        options.chunk = chunk;
        Session s(model, options);
        REQUIRE(all(s, text) == expected);
        REQUIRE(std::equal(s.logits().begin(), s.logits().end(), expected.end() - 61));
      }
      Session s(model, options);
      for (std::size_t i = 0; i < 66; ++i) {
        s.decode(text[i]);
        REQUIRE(std::equal(s.logits().begin(), s.logits().end(),
                           expected.begin() + static_cast<std::ptrdiff_t>(i) * 61));
      }
    }
  }
}

TEST_CASE("the CPU backend agrees with the reference") {
  Config c = tiny::config();
  for (const std::int32_t kv_heads : {1, 2, 3, 6}) {
    c.n_head_kv = kv_heads;
    const tiny::File file(c);
    SessionOptions options{.k_format = KvFormat::F32, .v_format = KvFormat::F32};
    Session cpu(open(file), options), reference(open(file, 0, "reference"), options);
    const Logits found = all(cpu, tiny::tokens(70)), expected = all(reference, tiny::tokens(70));
    float largest = 0, difference = 0;
    for (std::size_t i = 0; i < found.size(); ++i) {
      largest = std::max(largest, std::fabs(expected[i]));
      difference = std::max(difference, std::fabs(expected[i] - found[i]));
    }
    CHECK(largest > 0.1f);
    CHECK(difference < 1e-5f * largest);
  }
}

TEST_CASE("nothing is allocated after opening") {
  const tiny::File file;
  Session s(open(file, 3), {.chunk = 16});
  const std::vector<std::int32_t> text = tiny::tokens(100);
  Logits out(text.size() * 61);
  const Session::Progress progress = [](std::size_t, std::size_t) {};
  const auto in = [&](auto&& f) {
    const long before = allocations;
    f();
    return allocations - before;
  };
  CHECK(in([&] { s.prefill(text); }) == 0);
  CHECK(in([&] { s.prefill(text, out, progress); }) == 0);
  CHECK(in([&] { s.decode(3); }) == 0);
  CHECK(in([&] {
          for (int i = 0; i < 50; ++i) s.decode(i);
        }) == 0);
  CHECK(in([&] { s.rewind(40); }) == 0);
  CHECK(in([&] { s.decode(3); }) == 0);
  CHECK(in([] { ::operator delete(::operator new(4)); }) == 1);  // the counter counts
}

TEST_CASE("defaults and limits of n_ctx") {
  Config c = tiny::config();
  c.n_ctx_train = 5000;
  const tiny::File large(c), small;
  CHECK(Session(open(large)).n_ctx() == 4096);
  CHECK(Session(open(large)).chunk() == 128);
  CHECK(Session(open(small)).n_ctx() == 300);
  CHECK(Session(open(small), {.n_ctx = 300}).n_ctx() == 300);
  CHECK(Session(open(small), {.n_ctx = 50}).chunk() == 50);
  CHECK_THROWS_AS(Session(open(small), {.n_ctx = 301}), InvalidArgument);
  CHECK_THROWS_AS(Session(open(small), {.n_ctx = -1}), InvalidArgument);
  CHECK_THROWS_AS(Session(open(small), {.chunk = 0}), InvalidArgument);
  CHECK_THROWS_AS(Session(open(small), {.chunk = 65537}), InvalidArgument);
  CHECK_THROWS_AS(Session(nullptr), InvalidArgument);
}

TEST_CASE("a full context works, one token more does not fit and changes nothing") {
  const tiny::File file;
  const auto model = open(file);
  Session s(model, {.n_ctx = 70, .chunk = 32});
  s.prefill(tiny::tokens(69));
  const Logits before = last(s);
  CHECK_THROWS_AS(s.prefill(tiny::tokens(2)), ContextOverflow);
  CHECK(s.position() == 69);
  CHECK(last(s) == before);
  s.decode(tiny::tokens(70)[69]);
  CHECK(last(s) == fresh(model, tiny::tokens(70)));
  CHECK_THROWS_AS(s.decode(1), ContextOverflow);
  CHECK(s.tokens() == tiny::tokens(70));
}

TEST_CASE("bad tokens are refused before anything happens") {
  const tiny::File file;
  Session s(open(file));
  s.prefill(tiny::tokens(5));
  const Logits before = last(s);
  for (const std::int32_t bad :
       {-1, 61, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    CHECK_THROWS_AS(s.decode(bad), InvalidArgument);
    CHECK_THROWS_AS(s.prefill(std::vector<std::int32_t>{1, 2, bad}), InvalidArgument);
  }
  CHECK_THROWS_AS(s.prefill({}), InvalidArgument);
  Logits wrong(60);
  CHECK_THROWS_AS(s.prefill(std::vector<std::int32_t>{1}, wrong), InvalidArgument);
  CHECK(s.position() == 5);
  CHECK(last(s) == before);
}

TEST_CASE("an exception from progress keeps the finished chunks") {
  const tiny::File file;
  const auto model = open(file);
  Session s(model, {.chunk = 16});
  const std::vector<std::int32_t> text = tiny::tokens(100);
  std::vector<std::pair<std::size_t, std::size_t>> calls;
  CHECK_THROWS_AS(s.prefill(text, {},
                            [&](std::size_t done, std::size_t total) {
                              calls.emplace_back(done, total);
                              if (done == 32) throw std::domain_error("enough");
                            }),
                  std::domain_error);
  CHECK(calls == std::vector<std::pair<std::size_t, std::size_t>>{{16, 100}, {32, 100}});
  CHECK(s.position() == 32);
  CHECK(s.tokens() == tiny::tokens(32));
  CHECK_THROWS_AS(s.logits(), StateError);
  s.prefill(std::span(text).subspan(32));
  CHECK(last(s) == fresh(model, text));
}

TEST_CASE("a call from inside progress is refused") {
  const tiny::File file;
  Session s(open(file));
  int refused = 0;
  s.prefill(tiny::tokens(3), {}, [&](std::size_t, std::size_t) {
    CHECK(s.position() == 3);
    CHECK(s.tokens().size() == 3);
    try {
      s.decode(1);
    } catch (const StateError&) {
      ++refused;
    }
    try {
      s.close();
    } catch (const StateError&) {
      ++refused;
    }
  });
  CHECK(refused == 2);
  CHECK(s.position() == 3);
}

TEST_CASE("cancel() waits for the next step, and for one only") {
  const tiny::File file;
  const auto model = open(file);
  Session s(model);
  s.prefill(tiny::tokens(10));
  s.cancel();
  s.cancel();
  const Logits before = last(s);
  CHECK_THROWS_AS(s.decode(tiny::tokens(11)[10]), Cancelled);
  CHECK(s.position() == 10);
  CHECK(last(s) == before);
  s.decode(tiny::tokens(11)[10]);
  CHECK(last(s) == fresh(model, tiny::tokens(11)));
}

TEST_CASE("a prefill cancelled on its way reports what it consumed") {
  const tiny::File file;
  const auto model = open(file);
  const std::vector<std::int32_t> text = tiny::tokens(100);
  Session s(model, {.chunk = 16});
  std::size_t consumed = 0;
  try {
    s.prefill(text, {}, [&](std::size_t done, std::size_t) {
      if (done == 48) s.cancel();
    });
  } catch (const Cancelled& e) {
    consumed = e.consumed;
  }
  CHECK(consumed == 48);
  CHECK(s.position() == 48);
  s.prefill(std::span(text).subspan(48));
  CHECK(last(s) == fresh(model, text));
}

TEST_CASE("cancel() and an exception from poll end a step between two layers") {
  const tiny::File file;
  const auto model = open(file);
  // The poll is due at the first layer of a session's first step: cancelling there is in the middle of a
  // step.
  Session* running = nullptr;
  Session s(model, {.poll = [&] { running->cancel(); }});
  running = &s;
  CHECK_THROWS_AS(s.prefill(tiny::tokens(20)), Cancelled);
  CHECK(s.position() == 0);
  s.prefill(tiny::tokens(20));
  CHECK(last(s) == fresh(model, tiny::tokens(20)));

  int calls = 0;
  Session polled(model, {.poll = [&] {
                   if (++calls == 1) throw std::domain_error("a signal");
                 }});
  CHECK_THROWS_AS(polled.decode(tiny::tokens(1)[0]), std::domain_error);
  CHECK(polled.position() == 0);
  CHECK_THROWS_AS(polled.logits(), StateError);
  polled.prefill(tiny::tokens(20));
  CHECK(last(polled) == fresh(model, tiny::tokens(20)));
}

TEST_CASE("cancel() from another thread") {
  const tiny::File file;
  const auto model = open(file);
  const std::vector<std::int32_t> text = tiny::tokens(290);
  const Logits expected = fresh(model, text);
  Session s(model, {.chunk = 4});
  for (int attempt = 0; attempt < 5; ++attempt) {
    std::atomic<bool> begun{false};
    std::thread other([&] {
      while (!begun) std::this_thread::yield();
      s.cancel();
    });
    const auto at = static_cast<std::size_t>(s.position());
    try {
      s.prefill(std::span(text).subspan(at), {}, [&](std::size_t, std::size_t) { begun = true; });
    } catch (const Cancelled& e) {
      CHECK(s.position() == static_cast<std::int64_t>(at + e.consumed));
      CHECK(e.consumed % 4 == 0);
    }
    begun = true;  // also where a cancel that came too late, for the attempt before, ended this one at once
    other.join();
    if (s.position() > 200) s.rewind(150);
  }
  try {
    s.prefill(std::span(text).first(1));  // consumes a cancel that came too late
    s.rewind(1);
  } catch (const Cancelled&) {
  }
  s.prefill(std::span(text).subspan(static_cast<std::size_t>(s.position())));
  CHECK(last(s) == expected);
}

TEST_CASE("a damaged weight is an error that names the layer, and the text before it stays") {
  const std::vector<std::int32_t> text = tiny::tokens(20);
  const auto fails = [&](const std::string& damaged, float value, const std::string& where) {
    CAPTURE(damaged);
    const tiny::File file(tiny::config(), [&](const std::string& name, std::vector<float>& values) {
      // Of the embedding only the last token's row, so that a text can begin.
      if (name == damaged) values[values.size() - 1] = value;
    });
    for (const char* backend : {"cpu", "reference"}) {
      Session s(open(file, 2, backend), {.chunk = 7});
      std::string message;
      try {
        if (damaged == "token_embd.weight") {
          s.prefill(std::vector<std::int32_t>{1, 2, 3});
          s.decode(60);
        } else {
          s.prefill(text);
        }
      } catch (const NumericError& e) {
        message = e.what();
      }
      CHECK(message.find(where) != std::string::npos);
      if (damaged != "token_embd.weight") CHECK_THROWS_AS(s.logits(), StateError);
      // The head is looked at where logits are computed: behind the last chunk.
      const bool head = damaged.starts_with("output");
      CHECK(s.position() == (damaged == "token_embd.weight" ? 3 : head ? 14 : 0));
    }
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float value : {nan, inf, -inf}) {
    for (const std::string layer : {"0", "1", "2"}) {
      for (const char* name :
           {"attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_k.bias",
            "attn_output.weight", "ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"}) {
        fails("blk." + layer + "." + name, value, "layer " + layer + " ");
      }
    }
    fails("output_norm.weight", value, "logits");
    fails("output.weight", value, "logits");
    fails("token_embd.weight", value, "embedding");
  }
}

TEST_CASE("a key that overflows f16 is an error even where its score of minus infinity would hide it") {
  // Only token 60 has anything in column 7; its key there is out of range and points away from its query.
  const Config c = tiny::config();
  const auto column = [&](std::vector<float>& values, std::int32_t row) -> float& {
    return values[static_cast<std::size_t>(row * c.n_embd + 7)];
  };
  const tiny::File file(c, [&](const std::string& name, std::vector<float>& values) {
    if (name == "token_embd.weight") {
      for (std::int32_t row = 0; row < c.n_vocab; ++row) column(values, row) = 0.0f;
      std::fill(values.end() - c.n_embd, values.end(), 0.0f);
      column(values, 60) = 1.0f;
    } else if (name == "blk.0.attn_q.weight") {
      for (std::int32_t row = 0; row < c.q_dim(); ++row) column(values, row) = 1.0f;
    } else if (name == "blk.0.attn_k.weight") {
      for (std::int32_t row = 0; row < c.kv_dim(); ++row) column(values, row) = -1e9f;
    }
  });
  const auto model = open(file);
  Session s(model);
  s.prefill(std::vector<std::int32_t>{1, 2, 3, 4});
  std::string message;
  try {
    s.decode(60);
  } catch (const NumericError& e) {
    message = e.what();
  }
  CHECK(message.find("layer 0 ") != std::string::npos);
  CHECK(s.position() == 4);
  s.decode(5);
  CHECK(last(s) == fresh(model, std::vector<std::int32_t>{1, 2, 3, 4, 5}));
}

TEST_CASE("keys and values beyond f16 fit float32") {
  const std::vector<std::int32_t> text = tiny::tokens(20);
  for (const char* tensor : {"blk.1.attn_k.weight", "blk.1.attn_v.weight"}) {
    const tiny::File file(tiny::config(), [&](const std::string& name, std::vector<float>& values) {
      if (name == tensor)
        for (float& v : values) v *= 1e6f;
    });
    const auto model = open(file);
    Session half(model);
    std::string message;
    try {
      half.prefill(text);
    } catch (const NumericError& e) {
      message = e.what();
    }
    CHECK(message.find("layer 1 ") != std::string::npos);
    CHECK(message.find("f32") != std::string::npos);
    CHECK(half.position() == 0);
    Session full(model, {.k_format = KvFormat::F32, .v_format = KvFormat::F32});
    CHECK_NOTHROW(full.prefill(text));
  }
}

TEST_CASE("rewind, then other tokens") {
  const tiny::File file;
  const auto model = open(file);
  Session s(model, {.chunk = 16});
  const std::vector<std::int32_t> text = tiny::tokens(100);
  s.prefill(text);
  s.rewind(0);
  CHECK(s.logits().size() == 61);
  CHECK_THROWS_AS(s.rewind(101), InvalidArgument);
  CHECK_THROWS_AS(s.rewind(-1), InvalidArgument);
  s.rewind(35);
  CHECK(s.position() == 65);
  CHECK(s.tokens() == tiny::tokens(65));
  CHECK_THROWS_AS(s.logits(), StateError);
  std::vector<std::int32_t> other = tiny::tokens(65);
  for (const std::int32_t token : {9, 8, 7}) other.push_back(token);
  s.prefill(std::span(other).last(3));
  CHECK(last(s) == fresh(model, other));
  s.rewind(68);
  CHECK(s.position() == 0);
  s.prefill(text);
  CHECK(last(s) == fresh(model, text));
}

TEST_CASE("closing") {
  const tiny::File file;
  auto model = open(file);
  const std::weak_ptr<const Model> watch = model;
  Session s(model);
  model.reset();
  s.prefill(tiny::tokens(4));  // the session keeps the model
  CHECK(s.nbytes() > s.kv_bytes());
  CHECK(s.kv_bytes() == std::size_t{3} * 2 * (300 + 127) * 20 * 2 * 2);
  s.close();
  s.close();
  CHECK(s.closed());
  CHECK(s.nbytes() == 0);
  CHECK(s.kv_bytes() == 0);
  CHECK_THROWS_AS(s.decode(1), StateError);
  CHECK_THROWS_AS(s.prefill(tiny::tokens(1)), StateError);
  CHECK_THROWS_AS(s.logits(), StateError);
  CHECK_THROWS_AS(s.rewind(1), StateError);
  s.cancel();
  CHECK_FALSE(watch.expired());
}

TEST_CASE("sessions in several threads equal sessions alone; a busy one refuses") {
  const tiny::File file;
  for (const char* backend : {"cpu", "reference"}) {
    const auto model = open(file, 2, backend);
    const std::vector<std::int32_t> text = tiny::tokens(60);
    const Logits expected = fresh(model, text);
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        Session s(model, {.chunk = 1 + 7 * t});
        s.prefill(std::span(text).first(40));
        for (std::size_t i = 40; i < text.size(); ++i) s.decode(text[i]);
        right += last(s) == expected;
      });
    }
    for (std::thread& t : threads) t.join();
    CHECK(right == 4);
  }

  const auto model = open(file);
  Session shared(model, {.chunk = 1});
  const std::vector<std::int32_t> text = tiny::tokens(200);
  std::atomic<int> refused{0};
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) {  // what may be read at any time is always consistent
      const std::vector<std::int32_t> ids = shared.tokens();
      CHECK(std::equal(ids.begin(), ids.end(), text.begin()));
      CHECK(shared.position() >= static_cast<std::int64_t>(ids.size()));
      CHECK(shared.nbytes() > 0);
      try {
        (void)shared.logits();
      } catch (const StateError&) {
        ++refused;
      }
      std::this_thread::yield();
    }
  });
  while (shared.position() < 200) {
    try {
      shared.prefill(std::span(text).subspan(static_cast<std::size_t>(shared.position())));
    } catch (const StateError&) {  // the reader was at logits() just now
    }
  }
  done = true;
  reader.join();
  CHECK(refused > 0);
  CHECK(last(shared) == fresh(model, text));
}

TEST_CASE("closing against stepping") {
  const tiny::File file;
  const auto model = open(file);
  for (int i = 0; i < 10; ++i) {
    Session s(model);
    std::thread closer([&] {
      while (!s.closed()) {
        try {
          s.close();
        } catch (const StateError&) {
          std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
      }
    });
    try {
      for (int k = 0; k < 50; ++k) s.decode(k);
    } catch (const StateError&) {
    }
    closer.join();
    CHECK(s.closed());
  }
}

TEST_CASE("draws and log-probabilities come from the logits") {
  const tiny::File file;
  Session s(open(file));
  SamplerParams greedy;
  greedy.temperature = 0.0;
  Sampler sampler(61, greedy);
  CHECK_THROWS_AS(s.sample(sampler), StateError);
  CHECK_THROWS_AS(s.log_probability(0), StateError);
  CHECK_THROWS_AS(s.top_log_probabilities(3), StateError);
  s.prefill(tiny::tokens(9));
  const Logits logits = last(s);
  const auto best =
      static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  CHECK(s.sample(sampler) == best);
  double total = 0.0;
  for (const float x : logits) total += std::exp(static_cast<double>(x));
  for (const std::int32_t id : {0, 17, 60})
    CHECK(s.log_probability(id) ==
          doctest::Approx(logits[static_cast<std::size_t>(id)] - std::log(total)).epsilon(1e-5));
  CHECK_THROWS_AS(s.log_probability(61), InvalidArgument);
  const std::vector<LogProb> top = s.top_log_probabilities(3);
  REQUIRE(top.size() == 3);
  CHECK(top[0].id == best);
  CHECK(top[1].logprob <= top[0].logprob);
}

TEST_CASE("model options are checked") {
  const tiny::File file;
  CHECK_THROWS_AS(open(file, -1), InvalidArgument);
  CHECK_THROWS_AS(open(file, 1025), InvalidArgument);
  CHECK_THROWS_AS(open(file, 1, "quantum"), InvalidArgument);
  CHECK(open(file, 3)->n_threads() == 3);
  CHECK(open(file, 3, "reference")->n_threads() == 1);
}

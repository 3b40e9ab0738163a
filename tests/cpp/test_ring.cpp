// The ring's arithmetic, the rotation, and what happens to a session when a step fails anywhere.
#include "kv/ring.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder/model_parts.h"
#include "host/memory.h"
#include "kv/rotation.h"
#include "ringlm/error.h"
#include "ringlm/session.h"
#include "tiny_model.h"

namespace {
std::atomic<long> allocations{0};
std::atomic<std::size_t> allocated{0};  // bytes that are alive
constexpr std::size_t kPrefix = 16;     // holds the size of an allocation
}  // namespace
// Not inlined: GCC would take malloc and free for a mismatched pair.
[[gnu::noinline]] void* operator new(std::size_t n) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  allocated.fetch_add(n, std::memory_order_relaxed);
  auto* p = static_cast<std::byte*>(std::malloc(n + kPrefix));
  if (!p) throw std::bad_alloc();
  std::memcpy(p, &n, sizeof n);
  return p + kPrefix;
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  if (!p) return;
  std::byte* const begin = static_cast<std::byte*>(p) - kPrefix;
  std::size_t n = 0;
  std::memcpy(&n, begin, sizeof n);
  allocated.fetch_sub(n, std::memory_order_relaxed);
  std::free(begin);
}
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { ::operator delete(p); }

using namespace ringlm;

namespace {

using Bytes = std::vector<std::byte>;

Bytes saved(const Session& s) {
  Bytes bytes;
  s.save([&](std::span<const std::byte> piece) { bytes.insert(bytes.end(), piece.begin(), piece.end()); });
  return bytes;
}

std::unique_ptr<Session> loaded(const std::shared_ptr<const Model>& model, const Bytes& bytes) {
  std::size_t at = 0;
  return Session::load(model, [&](std::span<std::byte> piece) {
    if (piece.size() > bytes.size() - at) throw FileFormatError("truncated");
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), piece.size(), piece.begin());
    at += piece.size();
  });
}

std::vector<float> last(const Session& s) { return {s.logits().begin(), s.logits().end()}; }

std::shared_ptr<const Model> open(const tiny::File& file, std::vector<std::int32_t> windows = {},
                                  int n_threads = 2) {
  return Model::open(file.path(), {n_threads, "cpu", std::move(windows)});
}

// Small rings that wrap soon: full and windowed layers, INT8, a pinned prefix.
SessionOptions sliding() {
  return {.n_ctx = 40,
          .chunk = 8,
          .k_format = KvFormat::Int8,
          .v_format = KvFormat::Int8,
          .pinned = 5,
          .overflow = Overflow::Slide};
}
const std::vector<std::int32_t> kWindows{0, 16, 0};

// A backend that throws at a call, counted over all operations.
class FaultyOps final : public Ops {
 public:
  FaultyOps(std::unique_ptr<Ops> inner, std::function<void()> before)
      : inner_(std::move(inner)), before_(std::move(before)) {}
  const char* name() const override { return inner_->name(); }
  int n_threads() const override { return inner_->n_threads(); }
  std::size_t tile_floats(const Config& c, std::int64_t n) const override {
    return inner_->tile_floats(c, n);
  }
  std::size_t quantized_bytes(const Config& c, std::int64_t M) const override {
    return inner_->quantized_bytes(c, M);
  }
  std::size_t packed_bytes() const override { return inner_->packed_bytes(); }
  bool packed() const override { return inner_->packed(); }
  std::size_t scratch_bytes() const override { return inner_->scratch_bytes(); }
  void begin(const Config& c, const Step& s, bool looks) override { inner_->begin(c, s, looks); }
  void finish(const Config& c, const Step& s) override { inner_->finish(c, s); }
  void embed(const Config& c, const Weights& w, const Step& s) override { before_(), inner_->embed(c, w, s); }
  void norm_qkv(const Config& c, const LayerWeights& w, const Step& s) override {
    before_(), inner_->norm_qkv(c, w, s);
  }
  void rope_append(const Config& c, const LayerWeights& w, std::int32_t l, const Step& s) override {
    before_(), inner_->rope_append(c, w, l, s);
  }
  void attend(const Config& c, const LayerWeights& w, std::int32_t l, const Step& s) override {
    before_(), inner_->attend(c, w, l, s);
  }
  void out_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    before_(), inner_->out_residual(c, w, s);
  }
  void route(const Config& c, const LayerWeights& w, const Step& s) override {
    before_(), inner_->route(c, w, s);
  }
  void norm_gate_up(const Config& c, const LayerWeights& w, const Step& s) override {
    before_(), inner_->norm_gate_up(c, w, s);
  }
  void down_residual(const Config& c, const LayerWeights& w, const Step& s) override {
    before_(), inner_->down_residual(c, w, s);
  }
  void norm_head(const Config& c, const Weights& w, const Step& s) override {
    before_(), inner_->norm_head(c, w, s);
  }

 private:
  std::unique_ptr<Ops> inner_;
  std::function<void()> before_;
};

void wrap_ops(const std::shared_ptr<const Model>& model, std::function<void()> before) {
  auto& parts = const_cast<Model::Parts&>(model->parts());
  parts.ops = std::make_unique<FaultyOps>(std::move(parts.ops), std::move(before));
}

}  // namespace

TEST_CASE("slots and visibility, position by position") {
  for (const std::int64_t n_ctx : {1, 2, 7, 64, 100, 130}) {
    for (const std::int64_t pinned : {0, 1, 4, 63, 64, 65, 99}) {
      if (pinned >= n_ctx) continue;
      for (const std::int64_t chunk : {1, 5, 64}) {
        if (chunk > n_ctx) continue;
        const kv::Ring ring = kv::make_ring(0, n_ctx, pinned, chunk);
        CHECK(ring.capacity == n_ctx + chunk - 1);
        std::vector<std::int64_t> held(static_cast<std::size_t>(ring.capacity), -1);  // positions, by slot
        for (std::int64_t first = 0; first < 5 * n_ctx + 70; first += chunk) {
          for (std::int64_t p = first; p < first + chunk; ++p)
            held[static_cast<std::size_t>(ring.slot(p))] = p;
          for (std::int64_t p = first; p < first + chunk; ++p) {
            // By the definition, against what the tiles say, in their order.
            std::vector<std::int64_t> sees;
            for (std::int64_t t = 0; t <= p; ++t) {
              if (t < pinned || p - t < n_ctx - pinned) sees.push_back(t);
            }
            REQUIRE(static_cast<std::int64_t>(sees.size()) == ring.seen(p));
            const kv::Tiles tiles(ring, p);
            bool right = tiles.count() <= kv::Tiles::most(ring);
            std::vector<std::int64_t> found;
            for (std::int64_t i = 0; i < tiles.count(); ++i) {
              const kv::Tile tile = tiles[i];
              right &= tile.n >= 1 && tile.first / kv::kTile == (tile.first + tile.n - 1) / kv::kTile;
              for (std::int64_t t = tile.first; t < tile.first + tile.n; ++t) {
                found.push_back(t);
                right &= tile.pinned == (t < pinned);
                right &=
                    held[static_cast<std::size_t>(ring.slot(t))] == t;  // what is seen was not overwritten
              }
            }
            REQUIRE(right);
            REQUIRE(found == sees);
          }
        }
      }
    }
  }
  CHECK(kv::make_ring(16, 40, 5, 8).capacity == 23);
  CHECK(kv::make_ring(16, 40, 5, 8).pinned == 0);
  CHECK(kv::make_ring(40, 40, 5, 8).pinned == 5);
}

TEST_CASE("the rotation is orthogonal, and flat on a constant") {
  for (const std::int32_t d : {1, 2, 7, 12, 20, 24, 64, 80, 96, 112, 128, 160, 256, 320}) {
    CAPTURE(d);
    const kv::Rotation r = kv::make_rotation(d);
    const std::int32_t block = r.m * r.width;
    CHECK(d % block == 0);
    std::vector<std::vector<float>> rows;
    for (std::int32_t i = 0; i < d; ++i) {
      std::vector<float> x(static_cast<std::size_t>(d), 0.0f);
      x[static_cast<std::size_t>(i)] = 1.0f;
      kv::rotate(r, x.data());
      bool flat = true, back = true;
      for (std::int32_t j = 0; j < d; ++j) {  // every element of the block carries the same share
        const float share = i / block == j / block ? 1.0f / std::sqrt(static_cast<float>(block)) : 0.0f;
        flat &= std::fabs(std::fabs(x[static_cast<std::size_t>(j)]) - share) < 1e-6f;
      }
      rows.push_back(x);
      kv::rotate_back(r, x.data());
      for (std::int32_t j = 0; j < d; ++j)
        back &= std::fabs(x[static_cast<std::size_t>(j)] - (i == j)) < 1e-6f;
      REQUIRE(flat);
      REQUIRE(back);
    }
    double worst = 0.0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        double product = 0.0;
        for (std::size_t k = 0; k < rows.size(); ++k) product += static_cast<double>(rows[i][k]) * rows[j][k];
        worst = std::max(worst, std::fabs(product));
      }
    }
    CHECK(worst < 1e-6);
  }
  for (const std::int32_t d : {64, 80, 96, 128, 256})
    CHECK(kv::make_rotation(d).m * kv::make_rotation(d).width == d);
  for (const std::int32_t d : {64, 128, 256}) {  // the best possible is 1; without signs it is sqrt(d)
    std::vector<float> ones(static_cast<std::size_t>(d), 1.0f);
    kv::rotate(kv::make_rotation(d), ones.data());
    float largest = 0.0f;
    for (const float x : ones) largest = std::max(largest, std::fabs(x));
    CHECK(largest < 1.42f);
  }
}

TEST_CASE("what a session takes is what it said, to the byte") {
  const tiny::File file;
  for (const std::vector<std::int32_t>& windows :
       {std::vector<std::int32_t>{}, kWindows, std::vector<std::int32_t>{9}}) {
    const auto model = open(file, windows);
    for (const KvFormat k : {KvFormat::F32, KvFormat::F16, KvFormat::Int8}) {
      for (const KvFormat v : {KvFormat::F32, KvFormat::F16, KvFormat::Int8}) {
        const SessionOptions options{
            .n_ctx = 100, .chunk = 33, .k_format = k, .v_format = v, .pinned = windows.size() == 1 ? 0 : 7};
        const SessionPlan plan = plan_session(*model, options);
        const std::size_t before = allocated, mapped = host::mapped_bytes();
        auto session = std::make_unique<Session>(model, options);
        CHECK(allocated - before + (host::mapped_bytes() - mapped) == plan.nbytes);
        CHECK(session->nbytes() == plan.nbytes);
        CHECK(plan.nbytes == plan.kv_bytes + plan.activation_bytes + plan.scratch_bytes + plan.state_bytes);
        std::size_t rows = 0, kinds = 0;  // the formula of kv/cache.h
        for (std::int32_t layer = 0; layer < 3; ++layer) {
          const std::int32_t w = model->config().windows[static_cast<std::size_t>(layer)];
          const std::size_t capacity = static_cast<std::size_t>((w > 0 && w < 100 ? w : 100) + 33 - 1);
          const auto row = [](KvFormat f) {
            return f == KvFormat::F32 ? 80u : f == KvFormat::F16 ? 40u : 22u;
          };
          rows += 2 * (row(k) + row(v)) * capacity;
        }
        for (const LayerKind& kind : plan.kinds) kinds += kind.nbytes;
        CHECK(session->kv_bytes() == rows);
        CHECK(kinds == rows);
        session.reset();
        CHECK(host::mapped_bytes() == mapped);
      }
    }
  }
}

TEST_CASE("the largest n_ctx fits, and one more does not") {
  const tiny::File file;
  const auto model = open(file, kWindows);
  for (const std::int64_t n : {30, 31, 100, 299}) {
    SessionOptions options{.chunk = 20, .pinned = 4};
    options.n_ctx = n;
    const std::size_t memory = plan_session(*model, options).nbytes;
    const std::int64_t most = largest_n_ctx(*model, options, memory);
    CHECK(most >= n);
    options.n_ctx = most;
    CHECK(plan_session(*model, options).nbytes <= memory);
    options.n_ctx = most + 1;
    if (most < 300) CHECK(plan_session(*model, options).nbytes > memory);
  }
  CHECK(largest_n_ctx(*model, {}, 1000) == 0);
  CHECK(largest_n_ctx(*model, {}, std::size_t{1} << 40) == 300);
}

TEST_CASE("nothing is allocated in an endless text") {
  const tiny::File file;
  const auto model = open(file, kWindows, 3);
  Session s(model, sliding());
  s.start_trace(8, [] { return allocations.load(); });
  const std::vector<std::int32_t> text = tiny::tokens(30);
  const std::size_t mapped = host::mapped_bytes();
  const long before = allocations;
  for (int round = 0; round < 40; ++round) {
    s.prefill(text);
    for (int i = 0; i < 20; ++i) s.decode(i);
    if (round % 5 == 0) s.rewind(3);
  }
  CHECK(allocations == before);
  CHECK(host::mapped_bytes() == mapped);
  CHECK(s.position() == 40 * 50 - 8 * 3);
  const std::vector<TraceRecord> trace = s.take_trace();
  CHECK(trace.size() == 8);
  for (std::size_t i = 0; i < trace.size(); ++i) {
    CHECK(trace[i].kind == StepKind::Decode);
    CHECK(trace[i].position == s.position() - 8 + static_cast<std::int64_t>(i));
    CHECK(trace[i].allocations == 0);
    // Two layers see 40 rows and one 16; K and V of two heads, 20 codes and a scale each.
    CHECK(trace[i].kv_bytes == (40 + 40 + 16) * 2 * 2 * 22);
  }
  CHECK(s.take_trace().empty());
}

TEST_CASE("an exception at any operation leaves the session as it was") {
  const tiny::File file;
  const auto model = open(file, kWindows);
  long calls = 0, fail_at = -1;
  wrap_ops(model, [&] {
    if (++calls == fail_at) throw std::domain_error("a fault");
  });
  const std::vector<std::int32_t> text = tiny::tokens(200);
  const std::span<const std::int32_t> all(text);
  for (const std::size_t length :
       {3u, 39u, 40u, 45u, 100u, 147u}) {  // before the first wrap, at it, and behind it
    Session s(model, sliding()), untouched(model, sliding());
    fail_at = -1;
    s.prefill(all.first(length));
    untouched.prefill(all.first(length));
    const Bytes before = saved(s);
    for (const std::size_t n : {1u, 8u}) {  // a decode, and the largest chunk
      calls = 0;
      fail_at = -1;
      auto probe = s.fork();
      probe->prefill(all.subspan(length, n));
      const long total = calls;
      CHECK(total == 2 + 3 * 6);
      for (long at = 1; at <= total; ++at) {
        calls = 0;
        fail_at = at;
        CHECK_THROWS_AS(s.prefill(all.subspan(length, n)), std::domain_error);
        REQUIRE(saved(s) == before);
      }
    }
    fail_at = -1;
    s.prefill(all.subspan(length, 30));
    untouched.prefill(all.subspan(length, 30));
    CHECK(last(s) == last(untouched));
    CHECK(saved(s) == saved(untouched));
  }
}

TEST_CASE("a cancel at any layer, and NaN, leave the session as it was") {
  const tiny::File file(tiny::config(), [](const std::string& name, std::vector<float>& values) {
    if (name == "token_embd.weight") values.back() = std::numeric_limits<float>::quiet_NaN();  // of token 60
  });
  const auto model = open(file, kWindows);
  std::vector<std::int32_t> text = tiny::tokens(200);
  std::replace(text.begin(), text.end(), 60, 59);
  for (const std::size_t length : {5u, 40u, 131u}) {
    Session* running = nullptr;
    long calls = 0, cancel_at = -1;
    wrap_ops(model, [&] {
      if (++calls == cancel_at) running->cancel();
    });
    Session s(model, sliding());
    running = &s;
    s.prefill(std::span(text).first(length));
    const Bytes before = saved(s);
    for (const long at : {1L, 2L, 8L, 13L}) {  // heard before the layer that follows
      calls = 0;
      cancel_at = at;
      CHECK_THROWS_AS(s.decode(7), Cancelled);
      REQUIRE(saved(s) == before);
    }
    cancel_at = -1;
    CHECK_THROWS_AS(s.decode(60), NumericError);
    CHECK(saved(s) == before);
    std::vector<std::int32_t> chunk(8, 3);
    chunk[5] = 60;
    CHECK_THROWS_AS(s.prefill(chunk), NumericError);
    CHECK(saved(s) == before);
  }
}

TEST_CASE("in a batch one failure stops nobody else, and all are as if alone") {
  const tiny::File file(tiny::config(), [](const std::string& name, std::vector<float>& values) {
    if (name == "token_embd.weight") values.back() = std::numeric_limits<float>::infinity();
  });
  const auto model = open(file, kWindows);
  std::vector<std::unique_ptr<Session>> sessions, alone;
  const auto options = [](std::size_t i) {
    SessionOptions o = sliding();
    o.n_ctx = 30 + 10 * static_cast<std::int64_t>(i);
    o.pinned = static_cast<std::int64_t>(i % 3);
    if (i % 2) o.k_format = KvFormat::F16;
    o.chunk = 2;  // so that the batch runs in several groups
    if (i == 4) o.overflow = Overflow::Error;
    return o;
  };
  for (std::size_t i = 0; i < 7; ++i) {
    for (auto* list : {&sessions, &alone}) {
      list->push_back(std::make_unique<Session>(model, options(i)));
      list->back()->prefill(std::span<const std::int32_t>(tiny::tokens(70)).first(i == 4 ? 70 : 10 + 9 * i));
    }
  }
  sessions[5]->close();
  sessions[6]->cancel();
  const Bytes nan_before = saved(*sessions[2]), cancelled_before = saved(*sessions[6]),
              full_before = saved(*sessions[4]);
  std::vector<Session*> batch;
  for (const auto& s : sessions) batch.push_back(s.get());
  for (int round = 0; round < 60; ++round) {
    std::vector<std::int32_t> tokens;
    for (std::size_t i = 0; i < batch.size(); ++i)
      tokens.push_back(static_cast<std::int32_t>((7 * i + static_cast<std::size_t>(round)) % 59));
    tokens[2] = 60;
    const auto errors = step(batch, tokens);
    const auto is = [&](std::size_t i, auto error) {
      CHECK_THROWS_AS(std::rethrow_exception(errors[i]), decltype(error));
    };
    is(2, NumericError(""));
    is(4, ContextOverflow(""));
    is(5, StateError(""));
    if (round == 0) is(6, Cancelled("", 0));
    for (const std::size_t i : {0u, 1u, 3u}) {
      REQUIRE(!errors[i]);
      alone[i]->decode(tokens[i]);
      REQUIRE(last(*sessions[i]) == last(*alone[i]));
    }
    if (round == 0) CHECK(saved(*sessions[6]) == cancelled_before);
  }
  CHECK(saved(*sessions[2]) == nan_before);
  CHECK(saved(*sessions[4]) == full_before);
  for (const std::size_t i : {0u, 1u, 3u}) CHECK(saved(*sessions[i]) == saved(*alone[i]));
  std::vector<Session*> twice{batch[0], batch[1], batch[0]};
  const std::vector<std::int32_t> three{1, 2, 3}, two{1, 2};
  CHECK_THROWS_AS(step(twice, three), InvalidArgument);
  CHECK_THROWS_AS(step(std::span(twice).first(2), three), InvalidArgument);
  const auto other = open(file);
  Session foreign(other);
  std::vector<Session*> mixed{batch[0], &foreign};
  CHECK_THROWS_AS(step(mixed, two), InvalidArgument);
  CHECK(step({}, {}).empty());
}

TEST_CASE("an exception in a batch leaves the sessions of its group and of later ones as they were") {
  const tiny::File file;
  const auto model = open(file, kWindows);
  long calls = 0, fail_at = -1;
  wrap_ops(model, [&] {
    if (++calls == fail_at) throw std::domain_error("a fault");
  });
  constexpr long per_group = 2 + 3 * 6;
  for (const long at : {1L, 5L, per_group, per_group + 1, per_group + 9, 2 * per_group}) {
    std::vector<std::unique_ptr<Session>> sessions;
    std::vector<Session*> batch;
    std::vector<Bytes> before;
    for (std::size_t i = 0; i < 4; ++i) {
      SessionOptions o = sliding();
      o.chunk = 2;
      sessions.push_back(std::make_unique<Session>(model, o));
      fail_at = -1;
      sessions.back()->prefill(std::span<const std::int32_t>(tiny::tokens(60)).first(20 + 13 * i));
      batch.push_back(sessions.back().get());
      before.push_back(saved(*batch.back()));
    }
    calls = 0;
    fail_at = at;
    const auto errors = step(batch, std::vector<std::int32_t>{1, 2, 3, 4});
    fail_at = -1;
    const std::size_t advanced = at <= per_group ? 0 : 2;
    for (std::size_t i = 0; i < 4; ++i) {
      CHECK(!errors[i] == (i < advanced));
      CHECK((saved(*batch[i]) == before[i]) == (i >= advanced));
    }
    for (const auto& error : step(batch, std::vector<std::int32_t>{1, 2, 3, 4})) CHECK(!error);
  }
}

TEST_CASE("saved, loaded and forked sessions go on with the same bits") {
  const tiny::File file;
  for (const std::vector<std::int32_t>& windows : {std::vector<std::int32_t>{}, kWindows}) {
    const auto model = open(file, windows);
    for (const std::size_t length : {0u, 1u, 4u, 39u, 40u, 41u, 200u}) {
      Session s(model, sliding());
      if (length) s.prefill(std::span<const std::int32_t>(tiny::tokens(200)).first(length));
      const Bytes bytes = saved(s);
      const auto back = loaded(model, bytes);
      const auto copy = s.fork();
      CHECK(saved(*back) == bytes);
      CHECK(saved(*copy) == bytes);
      if (length) CHECK(last(*back) == last(s));
      const std::vector<std::int32_t> rest = tiny::tokens(77);
      s.prefill(rest);
      const Bytes after = saved(s);
      CHECK(saved(*copy) == bytes);  // independent
      copy->prefill(rest);
      back->prefill(rest);
      CHECK(saved(*copy) == after);
      CHECK(saved(*back) == after);
    }
  }
  const auto model = open(file, kWindows), plain = open(file);
  Session s(model, sliding());
  s.prefill(tiny::tokens(60));
  Bytes bytes = saved(s);
  CHECK_THROWS_AS(loaded(plain, bytes), FileFormatError);  // other windows
  for (std::size_t n = 0; n < bytes.size(); n += n < 200 ? 1 : 997) {
    CHECK_THROWS_AS(loaded(model, Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n))),
                    FileFormatError);
  }
  for (std::size_t at = 0; at < 84; ++at) {  // header and windows: an error or a session, never a crash
    for (const unsigned flip : {1u, 0x80u, 0xffu}) {
      Bytes other = bytes;
      other[at] ^= static_cast<std::byte>(flip);
      try {
        loaded(model, other);
      } catch (const Error&) {
      }
    }
  }
}

// The whole backend: sessions whose steps go through the real host side, with the executor as the device,
// against the CPU backend on the same file and the same kind of K/V rows.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "../cpp/tiny_model.h"
#include "cuda/cuda_ops.h"
#include "decoder/model_parts.h"
#include "ringlm/error.h"
#include "ringlm/session.h"
#include "simt/helpers.h"
#include "simt/runtime_api.h"

using namespace ringlm;

namespace {

Config config() {
  Config c = tiny::config();
  c.n_vocab = 77, c.n_embd = 96, c.n_layer = 2;
  c.n_head = 6, c.n_head_kv = 2, c.head_dim = 64, c.n_ff = 160;
  c.rope_dims = 64;
  return c;
}

std::shared_ptr<const Model> on_cpu(const tiny::File& file, std::vector<std::int32_t> windows = {}) {
  return Model::open(file.path(), {1, "cpu", std::move(windows)});
}

// The same model on the executor.
std::shared_ptr<const Model> on_gpu(const tiny::File& file, std::vector<std::int32_t> windows = {},
                                    const cuda::CudaOptions& options = {}) {
  auto model = Model::open(file.path(), {1, "reference", std::move(windows)});
  auto& parts = const_cast<Model::Parts&>(model->parts());
  parts.ops = cuda::make_cuda_ops(parts.config, parts.weights, options);
  return model;
}

std::vector<std::int32_t> text(std::size_t n, std::int32_t n_vocab = config().n_vocab) {
  std::vector<std::int32_t> ids(n);
  for (std::size_t i = 0; i < n; ++i)
    ids[i] = static_cast<std::int32_t>((i * i * 7 + i * 13 + 5) % size_t(n_vocab));
  return ids;
}

// Counters are for tests of kernels, and cost as much as all else.
[[maybe_unused]] const bool uncounted = [] { return simt::options().count = false; }();

// Where a step takes five times as long, the kernels' own tests look for the rest.
using simt::kSlowBuild;

std::vector<float> last(const Session& s) { return {s.logits().begin(), s.logits().end()}; }

// The largest difference over the largest logit.
double difference(std::span<const float> a, std::span<const float> b) {
  REQUIRE(a.size() == b.size());
  double most = 0, largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    most = simt::larger(most, std::fabs(double(a[i]) - b[i]));
    largest = std::max(largest, std::fabs(double(b[i])));
  }
  return most / largest;
}

SessionOptions options(KvFormat k, KvFormat v) {
  SessionOptions o;
  o.n_ctx = 64, o.chunk = 24, o.k_format = k, o.v_format = v;
  return o;
}

// Feeds both the same text, in pieces, then token by token; every logit row is compared.
double worst(const std::shared_ptr<const Model>& gpu, const std::shared_ptr<const Model>& cpu,
             const SessionOptions& o, std::span<const std::size_t> pieces, std::size_t n_decode) {
  Session a(gpu, o), b(cpu, o);
  std::size_t n = n_decode;
  for (const std::size_t piece : pieces) n += piece;
  const std::vector<std::int32_t> ids = text(n);
  std::span<const std::int32_t> left = ids;
  double most = 0;
  for (const std::size_t piece : pieces) {
    a.prefill(left.first(piece));
    b.prefill(left.first(piece));
    left = left.subspan(piece);
    most = simt::larger(most, difference(last(a), last(b)));
  }
  for (const std::int32_t id : left) {
    a.decode(id);
    b.decode(id);
    most = simt::larger(most, difference(last(a), last(b)));
  }
  return most;
}

}  // namespace

TEST_CASE("logits are those of the CPU, in decode and in prefill, for every format of the cache") {
  const tiny::File file(config());
  const auto gpu = on_gpu(file), cpu = on_cpu(file);
  unsigned way = 0;
  for (const KvFormat k : {KvFormat::F16, KvFormat::Int8}) {
    for (const KvFormat v : {KvFormat::F16, KvFormat::Int8}) {
      if (kSlowBuild && k != v) continue;
      CAPTURE(static_cast<int>(k));
      CAPTURE(static_cast<int>(v));
      simt::in_one_order(way++, [&] {
        const double decode = worst(gpu, cpu, options(k, v), std::vector<std::size_t>{1, 5}, 6);
        const double prefill = worst(gpu, cpu, options(k, v), std::vector<std::size_t>{27, 9}, 2);
        CHECK(decode < 2e-3);
        CHECK(prefill < 1e-2);
      });
    }
  }
}

TEST_CASE("a text that slides through its ring for longer than it is, with pinned tokens and with windows" *
          doctest::skip(kSlowBuild)) {
  const tiny::File file(config());
  SessionOptions o = options(KvFormat::Int8, KvFormat::Int8);
  o.n_ctx = 40, o.chunk = 10, o.overflow = Overflow::Slide;
  o.pinned = 5;
  CHECK(worst(on_gpu(file), on_cpu(file), o, std::vector<std::size_t>{33, 20, 7}, 12) < 1e-2);
  CHECK(worst(on_gpu(file, {0, 16}), on_cpu(file, {0, 16}), o, std::vector<std::size_t>{33, 20, 7}, 12) <
        1e-2);
}

TEST_CASE("captured graphs compute what single launches do, and two are for all positions") {
  const tiny::File file(config());
  const auto with = on_gpu(file), without = on_gpu(file, {}, {.graph = false});
  SessionOptions o = options(KvFormat::Int8, KvFormat::Int8);
  o.n_ctx = 20, o.chunk = 4, o.pinned = 3, o.overflow = Overflow::Slide;
  Session a(with, o), b(without, o);
  simt::fail_call("cudaGraphInstantiate", 3, cudaErrorUnknown);  // which would throw
  for (const std::int32_t id : text(kSlowBuild ? 8 : 30)) {
    a.decode(id);
    b.decode(id);
    CHECK(last(a) == last(b));
  }
  simt::reset_runtime();
}

TEST_CASE("a batch of sessions equals each alone, bit for bit") {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  std::vector<std::unique_ptr<Session>> alone, together;
  for (const KvFormat format : {KvFormat::Int8, KvFormat::F16, KvFormat::Int8}) {
    for (auto* to : {&alone, &together}) {
      to->push_back(std::make_unique<Session>(gpu, options(format, format)));
      to->back()->prefill(text(3 + 4 * alone.size()));
    }
  }
  for (std::int32_t id = 1; id < 5; ++id) {
    std::vector<Session*> sessions;
    for (const auto& s : together) sessions.push_back(s.get());
    const std::vector<std::int32_t> ids{id, id + 7, id + 20};
    for (const auto& error : step(sessions, ids)) CHECK(error == nullptr);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      alone[i]->decode(ids[i]);
      CHECK(last(*alone[i]) == last(*together[i]));
    }
  }
}

TEST_CASE(
    "a row of a batch is summed as alone over many tiles, and rows never mix in batches of any formats") {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  SessionOptions o = options(KvFormat::Int8, KvFormat::Int8);
  o.n_ctx = 200, o.chunk = 100;
  Session alone(gpu, o), together(gpu, o), other(gpu, o);
  for (Session* s : {&alone, &together}) s->prefill(text(150));
  alone.decode(3);
  Session* const two[] = {&other, &together};
  const std::int32_t ids[] = {9, 3};
  for (const auto& error : step(two, ids)) CHECK(error == nullptr);
  CHECK(last(alone) == last(together));

  for (const std::size_t int8 : {8, 9}) {  // of 12: more rows than gemv takes
    CAPTURE(int8);
    std::vector<std::unique_ptr<Session>> many, each;
    std::vector<Session*> sessions;
    std::vector<std::int32_t> next;
    for (std::size_t i = 0; i < 12; ++i) {
      const KvFormat format = i < int8 ? KvFormat::Int8 : KvFormat::F16;
      for (auto* to : {&many, &each}) {
        to->push_back(std::make_unique<Session>(gpu, options(format, format)));
        to->back()->prefill(text(1 + i % 5));
      }
      sessions.push_back(many.back().get());
      next.push_back(static_cast<std::int32_t>(i + 20));
    }
    for (const auto& error : step(sessions, next)) CHECK(error == nullptr);
    for (std::size_t i = 0; i < 12; ++i) {
      each[i]->decode(next[i]);
      CHECK(difference(last(*many[i]), last(*each[i])) < 1e-2);
    }
  }
}

TEST_CASE("logits of every token of a prefill" * doctest::skip(kSlowBuild)) {
  const tiny::File file(config());
  const auto gpu = on_gpu(file), cpu = on_cpu(file);
  for (const std::size_t n : {std::size_t{6}, std::size_t{31}}) {
    Session a(gpu, options(KvFormat::F16, KvFormat::F16)), b(cpu, options(KvFormat::F16, KvFormat::F16));
    std::vector<float> from_a(n * 77), from_b(n * 77);
    a.prefill(text(n), from_a);
    b.prefill(text(n), from_b);
    for (std::size_t i = 0; i < n; ++i) {
      CHECK(difference(std::span(from_a).subspan(i * 77, 77), std::span(from_b).subspan(i * 77, 77)) < 5e-3);
    }
    CHECK(std::equal(from_a.end() - 77, from_a.end(), a.logits().begin()));
  }
}

TEST_CASE("draws come from the largest logits, and the others from the device when somebody asks" *
          doctest::skip(simt::kHardware)) {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  const SessionOptions o = options(KvFormat::F16, KvFormat::F16);
  SamplerParams top_k;
  top_k.temperature = 2.0, top_k.top_k = 20;
  SamplerParams greedy = top_k, penalized = top_k, all = top_k;
  greedy.temperature = 0, penalized.repetition_penalty = 1.5, all.top_k = 0;
  for (const SamplerParams& p : {top_k, greedy, penalized, all}) {
    Session s(gpu, o);
    Sampler from_session(config().n_vocab, p), from_logits(config().n_vocab, p);
    s.prefill(text(5));
    for (int i = 0; i < (kSlowBuild ? 3 : 12); ++i) {
      simt::fail_call("cudaMemcpyAsync", 1, cudaErrorUnknown);
      if (i > 0 && from_session.n_needed() > kTopLogits) {
        CHECK_THROWS_AS(s.sample(from_session), DeviceError);
        simt::reset_runtime();
      }
      const std::int32_t token = s.sample(from_session);
      simt::reset_runtime();
      CHECK(token == from_logits.sample(s.logits()));
      s.decode(token);
    }
  }
}

TEST_CASE("sessions are saved, loaded, forked and rewound; what is saved on one device goes on on another") {
  const tiny::File file(config());
  const auto gpu = on_gpu(file), cpu = on_cpu(file);
  Session s(gpu, options(KvFormat::Int8, KvFormat::F16));
  s.prefill(text(20));
  std::vector<std::byte> bytes;
  s.save([&](std::span<const std::byte> piece) { bytes.insert(bytes.end(), piece.begin(), piece.end()); });
  const auto load = [&](const std::shared_ptr<const Model>& model) {
    std::size_t at = 0;
    return Session::load(model, [&](std::span<std::byte> piece) {
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), piece.size(), piece.begin());
      at += piece.size();
    });
  };
  const auto fork = s.fork(), again = load(gpu), there = load(cpu);
  CHECK(last(*fork) == last(s));
  CHECK(last(*there) == last(s));
  for (const std::int32_t id : {3, 9, 40}) {
    s.decode(id), fork->decode(id), again->decode(id), there->decode(id);
    CHECK(last(*s.fork()) == last(*fork));
    CHECK(last(*fork) == last(s));
    CHECK(last(*again) == last(s));
    CHECK(difference(last(*there), last(s)) < 2e-3);
  }
  const KvRows a = s.kv_rows(1, 1), b = there->kv_rows(1, 1);
  CHECK(a.positions == b.positions);
  CHECK(difference(a.k, b.k) < 1e-2);
  CHECK(difference(a.v, b.v) < 1e-2);
  const std::vector<float> before = last(s);
  s.rewind(1);
  s.decode(40);
  CHECK(last(s) == before);
}

TEST_CASE("a session's plan is what it takes on the device") {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  const SessionOptions o = options(KvFormat::Int8, KvFormat::Int8);
  const SessionPlan plan = plan_session(*gpu, o);
  Session s(gpu, o);
  CHECK(plan.device_bytes > plan.kv_bytes);
  CHECK(s.nbytes() == plan.nbytes);
  CHECK(s.kv_bytes() == plan.kv_bytes);
  CHECK_THROWS_WITH_AS(Session(gpu, options(KvFormat::F32, KvFormat::F32)),
                       doctest::Contains("not stored on a GPU"), InvalidArgument);
}

TEST_CASE("streams that run late change nothing: no buffer is used again too early" *
          doctest::skip(kSlowBuild)) {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  const SessionOptions o = options(KvFormat::Int8, KvFormat::F16);
  std::vector<std::vector<float>> logits[2];
  for (const bool late : {false, true}) {
    simt::runtime().late = late;
    Session s(gpu, o);
    for (const std::size_t n : {std::size_t{30}, std::size_t{3}}) {
      s.prefill(text(n));
      logits[late].push_back(last(s));
    }
    for (const std::int32_t id : {1, 2, 3}) {
      s.decode(id);
      logits[late].push_back(last(s));
    }
  }
  simt::reset_runtime();
  CHECK(logits[0] == logits[1]);
}

TEST_CASE("shapes that have no kernels are refused") {
  Config c = config();
  c.head_dim = c.rope_dims = 32;
  const tiny::File file(c);
  CHECK_THROWS_WITH_AS(on_gpu(file), doctest::Contains("heads have 32 elements"), UnsupportedModelError);
}

TEST_CASE("memory that is not there is said before it is taken" * doctest::skip(simt::kHardware)) {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  const simt::Live before = simt::live();
  const std::size_t all = simt::runtime().properties.totalGlobalMem;
  simt::runtime().others_bytes = all - before.device_bytes - 50'000;
  const SessionOptions o = options(KvFormat::F16, KvFormat::F16);
  CHECK_THROWS_WITH_AS(Session(gpu, o), doctest::Contains("on the GPU"), OutOfMemory);
  CHECK_THROWS_AS(on_gpu(file), OutOfMemory);
  simt::reset_runtime();
  simt::fail_call("cudaMalloc", 1, cudaErrorMemoryAllocation);
  CHECK_THROWS_AS(Session(gpu, o), OutOfMemory);
  simt::reset_runtime();
  const simt::Live after = simt::live();
  CHECK(after.device_bytes == before.device_bytes);
  CHECK(after.pinned_bytes == before.pinned_bytes);
  CHECK(after.handles == before.handles);
  Session s(gpu, o);
  s.decode(1);
}

TEST_CASE("a step that fails leaves the session as it was, wherever it fails" *
          doctest::skip(simt::kHardware)) {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  const SessionOptions o = options(KvFormat::Int8, KvFormat::Int8);
  Session s(gpu, o), other(gpu, o);
  for (Session* session : {&s, &other}) session->prefill(text(12));
  const auto fails = [&](const std::string& call, int nth, const std::string& named) {
    CAPTURE(call);
    CAPTURE(nth);
    simt::fail_call(call, nth, cudaErrorLaunchTimeout);
    std::string what;
    try {
      s.decode(7);
    } catch (const DeviceError& e) {
      what = e.what();
    }
    simt::reset_runtime();
    CHECK(what.find("cudaErrorLaunchTimeout") != std::string::npos);
    CHECK(what.find(named) != std::string::npos);
    CHECK(s.position() == 12);
  };
  fails("cudaLaunchKernel", 3, "rope_append");  // while the graph is captured
  fails("cudaLaunchKernel", 6, "gemv");
  fails("cudaGraphInstantiate", 1, "");
  fails("cudaGraphLaunch", 1, "");
  fails("cudaStreamSynchronize", 1, "a step");  // and when it is replayed
  s.cancel();
  CHECK_THROWS_AS(s.decode(7), Cancelled);
  CHECK(s.position() == 12);
  s.decode(7);
  other.decode(7);
  CHECK(last(s) == last(other));
  for (Session* session : {&s, &other}) session->decode(8);
  simt::fail_call("cudaStreamSynchronize", 1, cudaErrorLaunchTimeout);
  CHECK_THROWS_AS(s.decode(9), DeviceError);
  simt::reset_runtime();
  CHECK(last(s) == last(other));  // which have stayed on the device

  // Nor does one that puts others where these logits are.
  Session third(gpu, o);
  third.decode(1);
  for (const bool batch : {false, true}) {
    CAPTURE(batch);
    for (Session* session : {&s, &other}) session->decode(10);
    simt::fail_call("cudaStreamSynchronize", 2, cudaErrorLaunchTimeout);  // the first one brings them away
    if (batch) {
      Session* const both[] = {&s, &third};
      const std::int32_t ids[] = {11, 12};
      for (const auto& error : step(both, ids)) CHECK(error != nullptr);
    } else {
      CHECK_THROWS_AS(s.prefill(text(4)), DeviceError);
    }
    simt::reset_runtime();
    CHECK(last(s) == last(other));
  }
  for (const char* call : {"cudaMemcpyAsync", "cudaStreamSynchronize"}) {  // nor where logits are fetched
    std::vector<float> out(size_t(config().n_vocab));
    for (int nth = 1, done = 0; nth < 10 && done < 2; ++nth) {
      CAPTURE(call);
      CAPTURE(nth);
      const std::int64_t before = s.position();
      simt::fail_call(call, nth, cudaErrorLaunchTimeout);
      try {
        s.decode(9, out);
        ++done;
        CHECK(s.position() == before + 1);
        CHECK(last(s) == out);
      } catch (const DeviceError&) {
        CHECK(s.position() == before);
      }
      simt::reset_runtime();
    }
  }
  {
    Session fresh(gpu, o);
    fresh.cancel();
    CHECK_THROWS_AS(fresh.decode(7), Cancelled);  // while the graph is captured: nothing of that stays,
    Session another(gpu, o);                      // and memory can be had and given back
  }
}

TEST_CASE("a batch that goes on without the session whose buffers it uses leaves that one its logits") {
  const tiny::File file(config());
  const auto gpu = on_gpu(file);
  const SessionOptions o = options(KvFormat::Int8, KvFormat::Int8);
  Session* to_cancel = nullptr;
  SessionOptions polled = o;
  polled.poll = [&] {
    if (to_cancel) to_cancel->cancel();
  };
  Session host(gpu, polled), twin(gpu, o), other(gpu, o);
  for (Session* session : {&host, &twin}) session->decode(13);
  to_cancel = &host;
  std::this_thread::sleep_for(std::chrono::milliseconds(60));  // polls are at least 50 apart
  Session* const both[] = {&host, &other};
  const std::int32_t ids[] = {14, 15};
  const auto errors = step(both, ids);
  CHECK(errors[0] != nullptr);
  CHECK(errors[1] == nullptr);
  CHECK(host.position() == 1);
  CHECK(last(host) == last(twin));
}

TEST_CASE("numbers that are none name the layer and the operation" * doctest::skip(kSlowBuild)) {
  const auto error_of = [](const std::string& tensor, float value, KvFormat format) -> std::string {
    const tiny::File file(config(), [&](const std::string& name, std::vector<float>& values) {
      if (name == tensor) values[5] = value;
    });
    const auto gpu = on_gpu(file);
    for (const std::size_t n : {std::size_t{1}, std::size_t{20}}) {
      Session s(gpu, options(format, format));
      try {
        s.prefill(text(n));
      } catch (const NumericError& e) {
        CHECK(s.position() == 0);
        if (n == 20) return e.what();
        continue;
      }
      return "no error";
    }
    return {};
  };
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const auto names = [&](const std::string& tensor, float value, KvFormat format, const char* expected) {
    const std::string what = error_of(tensor, value, format);
    CAPTURE(tensor);
    CAPTURE(what);
    CHECK(what.find(expected) != std::string::npos);
  };
  names("blk.1.ffn_down.weight", nan, KvFormat::Int8, "layer 1 (down_residual)");
  names("blk.0.ffn_gate.weight", nan, KvFormat::F16, "layer 0 (norm_gate_up)");
  names("output.weight", nan, KvFormat::F16, "logits");
  names("blk.1.attn_k.bias", 1e6f, KvFormat::F16, "key or value in layer 1");
  names("blk.1.attn_k.bias", 1e6f, KvFormat::F16, "on the CPU");
}

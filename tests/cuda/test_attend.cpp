// Decode attention against its definition in double. Rows of the ring that no query sees hold NaNs.
//
// Tolerance: queries and weights are halves, each off by up to 2^-12, in either direction. So outputs are
// allowed 4e-4 of the largest value of the row; what is measured is up to 1.3e-4.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "kv/cache.h"
#include "ops/ops.h"
#include "random_shapes.h"
#include "simt/helpers.h"

using namespace ringlm;
using namespace simt;

namespace {

constexpr KvFormat kF16 = KvFormat::F16, kInt8 = KvFormat::Int8;
constexpr double kTolerance = 4e-4;
constexpr int kLayer = 1;  // of two; the other one is never written

// One session, and the positions of its rows in the step.
struct SessionSpec {
  std::int64_t n_ctx, pinned, window, chunk;
  std::vector<std::int64_t> positions;
};

struct Spec {
  std::int32_t head_dim, n_head_kv, group;
  KvFormat k, v;
  int splits;
  std::vector<SessionSpec> sessions;
  float softcap = 0.0f;
  bool centred = false;
  float query_size = 2.0f, value_size = 1.0f;
  bool value_sizes_differ = false;
  float pinned_by = 1.0f;  // queries of pinned rows are so many times larger
};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// A session in device memory: what its rows see is written, all else is as it was allocated.
class Session {
 public:
  Session(const Spec& spec, const SessionSpec& s, std::mt19937& random)
      : spec_(spec),
        ring_(kv::make_ring(static_cast<std::int32_t>(s.window), s.n_ctx, s.pinned, s.chunk)),
        k_("k", rows() * bytes(spec.k)),
        v_("v", rows() * bytes(spec.v)),
        k_scales_("k scales", spec.k == kInt8 ? rows() * 2 : 0),
        v_scales_("v scales", spec.v == kInt8 ? rows() * 2 : 0),
        layers_("layers", 2) {
    layout_.n_ctx = s.n_ctx;
    layers_[kLayer] = {k_.data(),
                       v_.data(),
                       spec.k == kInt8 ? k_scales_.data() : nullptr,
                       spec.v == kInt8 ? v_scales_.data() : nullptr,
                       ring_.visible,
                       ring_.pinned,
                       ring_.capacity};
    std::normal_distribution<float> normal;
    std::vector<float> row(size(spec.head_dim));
    const std::int64_t last = *std::max_element(s.positions.begin(), s.positions.end());
    const std::int64_t oldest = *std::min_element(s.positions.begin(), s.positions.end());
    const auto write = [&](std::int64_t t) {
      for (std::int32_t head = 0; head < spec.n_head_kv; ++head) {
        for (float& x : row) x = normal(random);
        kv::store_row(k(head), ring_.slot(t), row.data(), spec.head_dim);
        float by = spec.value_size;
        if (spec.value_sizes_differ) by *= std::exp2(std::floor(2.0f * normal(random)));
        for (float& x : row) x = by * normal(random);
        kv::store_row(v(head), ring_.slot(t), row.data(), spec.head_dim);
      }
    };
    for (std::int64_t t = 0; t < std::min(ring_.pinned, last + 1); ++t) write(t);
    for (std::int64_t t = std::max<std::int64_t>(ring_.oldest(oldest), ring_.pinned); t <= last; ++t)
      write(t);
  }

  kv::Rows k(std::int32_t head) { return of(head, spec_.k, k_, k_scales_); }
  kv::Rows v(std::int32_t head) { return of(head, spec_.v, v_, v_scales_); }
  const kv::Ring& ring() const { return ring_; }
  const kv::Layout& layout() const { return layout_; }
  cuda::DeviceRow row(std::int64_t position) { return {position, layout_.epoch(), layers_.data(), 0}; }

 private:
  std::size_t rows() const { return size(spec_.n_head_kv) * size(ring_.capacity); }
  std::size_t bytes(KvFormat format) const { return size(spec_.head_dim) * element_bytes(format); }
  kv::Rows of(std::int32_t head, KvFormat format, Buffer<std::uint8_t>& data, Buffer<std::uint8_t>& scales) {
    const std::size_t first = size(head) * size(ring_.capacity);
    return {format, data.data() + first * bytes(format),
            format == kInt8 ? scales.data() + 2 * first : nullptr};
  }

  const Spec& spec_;
  kv::Ring ring_;
  kv::Layout layout_;
  Buffer<std::uint8_t> k_, v_, k_scales_, v_scales_;
  Buffer<cuda::KvLayer> layers_;
};

struct Problem {
  explicit Problem(const Spec& given, unsigned seed = 1) : spec(given), random(seed) {
    for (const SessionSpec& s : spec.sessions) {
      sessions.push_back(std::make_unique<Session>(spec, s, random));
      for (const std::int64_t p : s.positions) {
        rows.push_back(sessions.back()->row(p));
        session_of.push_back(sessions.back().get());
      }
    }
    const std::size_t heads = rows.size() * size(n_head());
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < heads; ++i) {  // each head has a size of its own
      const float by = spec.query_size * std::exp2(normal(random) / 4.0f);
      for (std::int32_t d = 0; d < spec.head_dim; ++d) {
        q.push_back(by * normal(random));
        q_pinned.push_back(by * spec.pinned_by * normal(random));
      }
    }
    for (std::size_t i = 0; i < heads * kEpochs; ++i) offsets.push_back(2.0f / scale() * normal(random));
    reference();
  }

  std::int32_t n_head() const { return spec.n_head_kv * spec.group; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(spec.head_dim)) / spec.query_size; }
  std::size_t width() const { return size(n_head()) * size(spec.head_dim); }

  // As ops/reference.cpp has it, but for one thing: which positions are visible, by the rule itself.
  void reference() {
    expected.assign(rows.size() * width(), 0.0f);
    largest.assign(rows.size(), 0.0);
    std::vector<float> row(size(spec.head_dim));
    for (std::size_t m = 0; m < rows.size(); ++m) {
      Session& s = *session_of[m];
      const kv::Ring& ring = s.ring();
      const std::int64_t p = rows[m].position;
      std::vector<std::int64_t> visible;
      for (std::int64_t t = 0; t < std::min(ring.pinned, p + 1); ++t) visible.push_back(t);
      for (std::int64_t t = std::max(ring.pinned, p - ring.visible); t <= p; ++t) {
        if (p - t < ring.visible - ring.pinned) visible.push_back(t);
      }
      for (std::int32_t h = 0; h < n_head(); ++h) {
        const std::size_t head = m * size(n_head()) + size(h);
        std::vector<double> score, sum(size(spec.head_dim));
        for (const std::int64_t t : visible) {
          const bool pinned = t < ring.pinned;
          kv::load_row(s.k(h / spec.group), ring.slot(t), row.data(), spec.head_dim);
          double product = 0.0;
          for (std::size_t d = 0; d < row.size(); ++d) {
            product += static_cast<double>((pinned ? q_pinned : q)[head * row.size() + d]) * row[d];
          }
          if (spec.centred) product += offsets[head * kEpochs + epoch_of(s.layout(), t, p, pinned)];
          product *= scale();
          score.push_back(spec.softcap > 0.0f ? spec.softcap * std::tanh(product / spec.softcap) : product);
        }
        const double most = *std::max_element(score.begin(), score.end());
        double total = 0.0;
        for (std::size_t i = 0; i < visible.size(); ++i) {
          const double weight = std::exp(score[i] - most);
          total += weight;
          kv::load_row(s.v(h / spec.group), ring.slot(visible[i]), row.data(), spec.head_dim);
          for (std::size_t d = 0; d < row.size(); ++d) {
            sum[d] += weight * row[d];
            largest[m] = std::max(largest[m], static_cast<double>(std::abs(row[d])));
          }
        }
        float* const out = &expected[head * row.size()];
        for (std::size_t d = 0; d < row.size(); ++d) out[d] = static_cast<float>(sum[d] / total);
        if (spec.v == kInt8) kv::rotate_back(kv::make_rotation(spec.head_dim), out);
      }
    }
  }

  // Launches, and checks all that it leaves.
  void run() {
    const auto M = static_cast<std::int64_t>(rows.size());
    const auto cols = static_cast<std::int32_t>(width());
    Buffer<cuda::DeviceRow> d_rows("rows", rows);
    Buffer<float> d_q("q", q), d_q_pinned("q_pinned", q_pinned), d_offsets("offsets", offsets);
    Buffer<float> att("att", expected.size());
    Buffer<std::int8_t> digits("digits", cuda::Quantized::digit_bytes(cols, M));
    Buffer<float4> scales("scales", cuda::Quantized::scale_bytes(cols, M) / sizeof(float4));
    Buffer<unsigned> arrived("arrived", std::vector<unsigned>(size(M * spec.n_head_kv), 0u));
    cuda::Attend a{};
    a.rows = d_rows.data();
    a.M = static_cast<int>(M);
    a.layer = kLayer;
    a.q = d_q.data();
    a.q_pinned = d_q_pinned.data();
    a.offsets = spec.centred ? d_offsets.data() : nullptr;
    a.n_head = n_head();
    a.n_head_kv = spec.n_head_kv;
    a.head_dim = spec.head_dim;
    a.k_format = spec.k;
    a.v_format = spec.v;
    a.scale = scale();
    a.softcap = spec.softcap;
    a.att = att.data();
    a.out = {digits.data(), scales.data(), nullptr, cols};
    a.splits = spec.splits;
    Buffer<float> partial("partial", cuda::attend_partial_floats(a));
    a.partial = partial.data();
    a.arrived = arrived.data();
    const bool quantizes = spec.group * spec.head_dim % cuda::kBlock == 0;
    CHECK(cuda::attend_quantizes(a) == quantizes);
    cuda::attend(a, nullptr);
    if (!kHardware) of_partial = report().buffer("partial");

    double worst = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double error = std::abs(static_cast<double>(att[i]) - expected[i]) / largest[i / width()];
      worst = larger(worst, error);
    }
    CHECK(worst < kTolerance);
    CHECK(std::all_of(arrived.begin(), arrived.end(), [](unsigned n) { return n == 0; }));
    CHECK(report().bypasses == 0);
    if (quantizes) {
      check_quantized(att, digits, scales, M);
    } else {
      CHECK(std::all_of(digits.begin(), digits.end(), [](std::int8_t x) { return x == -1; }));  // untouched
    }
  }

  void check_quantized(Buffer<float>& att, Buffer<std::int8_t>& digits, Buffer<float4>& scales,
                       std::int64_t M) const {
    const std::size_t blocks = width() / cuda::kBlock;
    int wrong = 0;
    for (std::size_t i = 0; i < size(M) * blocks; ++i) {
      const float* const x = att.data() + i * cuda::kBlock;
      float top = 0.0f;
      for (int c = 0; c < cuda::kBlock; ++c) top = std::max(top, std::abs(x[c]));
      const float step = top * (1.0f / 32639.0f);
      int sums[2] = {};
      for (std::size_t c = 0; c < cuda::kBlock; ++c) {
        const int code = static_cast<int>(std::nearbyint(x[c] * (32639.0f / top)));
        const auto digit = [&](std::size_t plane) {
          return digits[((i / blocks * 4 + plane + c / 16) * blocks + i % blocks) * 16 + c % 16];
        };
        wrong += 256 * digit(0) + digit(2) != code;
        sums[c / 16] += code;
      }
      const float4 s = scales[i];
      wrong += s.x != step || s.y != step * static_cast<float>(sums[0]) ||
               s.z != step * static_cast<float>(sums[1]) ||
               s.w != step * static_cast<float>(sums[0] + sums[1]);
    }
    CHECK(wrong == 0);
  }

  const Spec spec;
  std::mt19937 random;
  std::vector<std::unique_ptr<Session>> sessions;
  std::vector<Session*> session_of;  // by row
  std::vector<cuda::DeviceRow> rows;
  std::vector<float> q, q_pinned, offsets, expected;
  std::vector<double> largest;  // by row: of its values
  BufferCount of_partial;       // in the last run
};

void check(const Spec& spec) {
  CAPTURE(spec.head_dim);
  CAPTURE(spec.group);
  CAPTURE(static_cast<int>(spec.k));
  CAPTURE(static_cast<int>(spec.v));
  CAPTURE(spec.splits);
  Problem problem(spec);
  in_every_order([&] { problem.run(); });
}

// Sessions whose queries see that many positions.
std::vector<SessionSpec> lengths(std::vector<std::int64_t> n) {
  std::vector<SessionSpec> all;
  for (const std::int64_t length : n) all.push_back({256, 0, 0, 1, {length - 1}});
  return all;
}

}  // namespace

TEST_CASE("lengths around the ends of tiles and splits") {
  check({64, 2, 1, kInt8, kInt8, 1, lengths({1, 15, 16, 17, 63, 64, 65})});
  check({64, 1, 3, kF16, kF16, 3, lengths({1, 64, 65, 127, 128, 129, 193, 256})});
  check({128, 1, 4, kInt8, kInt8, 2, lengths({16, 64, 65, 129})});
  check({128, 2, 2, kF16, kF16, 4, lengths({33, 256})});
}

TEST_CASE("any number of splits") {
  for (int splits = 1; splits <= 9; ++splits) {
    CAPTURE(splits);
    Problem({64, 1, 1, kInt8, kInt8, splits, {{448, 70, 0, 1, {1000}}, {448, 0, 0, 1, {200}}}}).run();
  }
}

// So that the last block has not more to read than the others. What nobody fills stays as it was.
TEST_CASE("long texts of large groups are split less") {
  struct Shape {
    int group;
    std::int64_t position;
    int expected;  // ceil(tiles / each),  each = floor(sqrt(tiles group 4 (64 + 2) / (64 2 (64 + 2))))
  };
  for (const Shape& shape :
       {Shape{8, 1023, 8}, Shape{8, 2047, 16}, Shape{8, 2111, 17}, Shape{16, 2047, 8}, Shape{20, 2047, 8}}) {
    CAPTURE(shape.group);
    CAPTURE(shape.position);
    Problem problem({64, 1, shape.group, kInt8, kInt8, 40, {{4096, 0, 0, 1, {shape.position}}}});
    problem.run();
    if (kHardware || kRaceBuild) continue;  // counts nothing
    CHECK(problem.of_partial.unique_written == size(shape.expected) * size(shape.group) * 66 * 4);
  }
}

TEST_CASE("head sizes, formats and groups") {
  const std::vector<SessionSpec> sessions = {{100, 17, 0, 4, {1000}}, {64, 5, 0, 1, {40}}};
  check({64, 1, 5, kInt8, kInt8, 2, sessions});
  check({80, 1, 2, kInt8, kInt8, 2, sessions});
  check({80, 2, 3, kF16, kF16, 1, sessions});  // groups that are no whole blocks
  check({96, 1, 7, kInt8, kInt8, 1, sessions});
  check({96, 1, 4, kF16, kF16, 3, sessions});
  check({128, 1, 8, kInt8, kInt8, 2, sessions});
  check({256, 1, 4, kInt8, kInt8, 2, sessions});
  check({256, 1, 2, kF16, kF16, 1, sessions});
  check({64, 1, 2, kInt8, kF16, 2, sessions});
  check({128, 1, 3, kF16, kInt8, 2, sessions});
  check({256, 1, 1, kInt8, kF16, 1, sessions});
}

// Rows of one split and of two, for one head tile and, where there is a kernel for it, two.
TEST_CASE("every template, with and without others to wait for") {
  unsigned i = 0;
  for (const std::int32_t head_dim : {64, 80, 96, 128, 256}) {
    for (const KvFormat k : {kInt8, kF16}) {
      for (const KvFormat v : {kInt8, kF16}) {
        for (const std::int32_t group : {3, 12}) {
          const Spec spec{head_dim, 1, group, k, v, 2, {{64, 0, 0, 1, {40}}, {128, 0, 0, 1, {100}}}};
          CAPTURE(head_dim);
          CAPTURE(group);
          CAPTURE(static_cast<int>(k));
          CAPTURE(static_cast<int>(v));
          in_one_order(++i, [&] { Problem(spec, i).run(); });
        }
      }
    }
  }
}

TEST_CASE("groups of more than 8 heads") {
  const std::vector<SessionSpec> sessions = {{100, 17, 0, 4, {1000}}};
  check({128, 1, 16, kInt8, kInt8, 2, sessions});
  check({64, 2, 9, kF16, kF16, 1, sessions});
  check({96, 1, 12, kInt8, kInt8, 1, sessions});
  check({80, 1, 12, kF16, kF16, 2, sessions});
  // Several blocks for a KV head, with one split and with more.
  check({64, 2, 20, kInt8, kInt8, 1, sessions});
  check({256, 1, 12, kInt8, kInt8, 2, sessions});
  check({80, 1, 9, kInt8, kF16, 1, sessions});
}

TEST_CASE("pinned rows, and rings that have come round") {
  for (const KvFormat format : {kInt8, kF16}) {
    std::vector<SessionSpec> sessions;
    for (const std::int64_t p : {0, 16, 17, 18, 99, 100, 103, 120}) {
      sessions.push_back({100, 17, 0, 4, {std::int64_t{p}}});
    }
    check({64, 1, 4, format, format, 3, sessions});
    // Positions that do not fit 32 bits, a long prefix, and one that is nearly all there is.
    check({64,
           2,
           4,
           format,
           format,
           2,
           {{128, 10, 0, 1, {5'000'000'123}}, {200, 130, 0, 3, {129, 130, 131}}, {100, 99, 0, 1, {7'000}}}});
  }
}

TEST_CASE("windows") {
  // Smaller than a warp's keys, than a tile, and larger; the ring a little longer than the window.
  for (const std::int64_t chunk : {1, 5}) {
    check({64,
           1,
           4,
           kInt8,
           kInt8,
           2,
           {{512, 0, 1, chunk, {70}},
            {512, 0, 7, chunk, {3}},
            {512, 0, 7, chunk, {1'000}},
            {512, 0, 20, chunk, {19}},
            {512, 0, 20, chunk, {500}},
            {512, 0, 100, chunk, {12'345}}}});
  }
}

TEST_CASE("soft cap") {
  Spec spec{64, 1, 4, kInt8, kInt8, 2, {{128, 17, 0, 1, {1000}}}};
  spec.softcap = 1.5f;
  check(spec);
  spec.centred = true;
  check(spec);
}

TEST_CASE("keys of several epochs") {
  Spec spec{64,
            2,
            3,
            kInt8,
            kInt8,
            3,
            {{128, 17, 0, 1, {100}},
             {128, 17, 0, 1, {128}},
             {128, 17, 0, 1, {200}},
             {100, 0, 0, 7, {256, 257}},
             {512, 0, 90, 1, {520}}}};
  spec.centred = true;
  check(spec);
  check({128, 1, 12, kInt8, kInt8, 1, {{128, 17, 0, 1, {300}}}, 0.0f, true});
}

TEST_CASE("queries and scales of any size") {
  // A query in the thousands, and one that is hardly there; values whose scales are subnormal halves.
  Spec spec{64, 1, 4, kInt8, kInt8, 2, {{128, 17, 0, 1, {1000}}}};
  for (const float query : {3e3f, 1e-6f}) {
    for (const float value : {300.0f, 2e-3f}) {
      spec.query_size = query;
      spec.value_size = value;
      spec.value_sizes_differ = value > 1.0f;
      check(spec);
    }
  }
  // An attention sink: one key has nearly all the weight, and the others, small as they are, still count.
  spec = {64, 1, 8, kInt8, kInt8, 1, {{256, 1, 0, 1, {1000}}}};
  spec.value_size = 1e-3f;
  spec.pinned_by = 10.0f;
  check(spec);
}

TEST_CASE("random shapes: any length, ring, prefix, window, group, format and number of splits") {
  shapes::Choice choice(1);
  for (int i = 0; i < shapes::kMany; ++i) {
    CAPTURE(i);
    Spec spec{choice.one_of({64, 80, 96, 128, 256}),
              choice.between(1, 3),
              choice.between(1, 20),
              choice.one_of({kInt8, kF16}),
              choice.one_of({kInt8, kF16}),
              choice.one_of({1, 2, 3, 5, 8, 40}),
              {}};
    spec.softcap = choice.once_in(3) ? 2.0f : 0.0f;
    spec.centred = spec.k == kInt8 && choice.once_in(2);
    for (int n = choice.between(1, 3); n > 0; --n) {
      SessionSpec s{};
      s.n_ctx = choice.one_of({1, 16, 17, 63, 64, 65, choice.between(2, 400), choice.between(2, 400)});
      s.pinned = choice.once_in(2) ? choice.between(0, s.n_ctx - 1) : 0;
      s.window = choice.once_in(3) ? choice.between(1, s.n_ctx) : 0;
      s.chunk = std::min<std::int64_t>(choice.between(1, 8), s.n_ctx);
      const std::int64_t last = choice.one_of<std::int64_t>(
          {0, s.n_ctx - 1, s.n_ctx, choice.between(0, 3 * s.n_ctx),
           64 * choice.between(1, 6) + choice.between(-1, 1), 1'000'000'000'000 + choice.between(0, 1000)});
      const std::int64_t rows =
          std::min({choice.between(std::int64_t{1}, s.chunk), std::int64_t{3}, last + 1});
      for (std::int64_t p = last - rows + 1; p <= last; ++p) s.positions.push_back(p);
      spec.sessions.push_back(s);
    }
    const auto seed = static_cast<unsigned>(i);
    in_one_order(seed, [&] { Problem(spec, seed).run(); });
  }
}

// In one order: the counters do not depend on it, and the executor has 8192 keys to go through.
TEST_CASE("4096 positions: exactness, bytes and bank conflicts") {
  if (kSlowBuild) return;
  struct Shape {
    std::int32_t head_dim;
    KvFormat format;
    std::int64_t position;
  };
  for (const Shape& shape : {Shape{64, kInt8, 4095}, Shape{128, kInt8, 4095}, Shape{128, kInt8, 1'000'000},
                             Shape{128, kF16, 4095}, Shape{256, kInt8, 4095}, Shape{256, kF16, 4095}}) {
    CAPTURE(shape.head_dim);
    CAPTURE(static_cast<int>(shape.format));
    constexpr int kHeads = 2;
    Problem problem(
        {shape.head_dim, kHeads, 4, shape.format, shape.format, 8, {{4096, 0, 0, 1, {shape.position}}}});
    reset_report();
    problem.run();
    if (kHardware) continue;  // counts nothing
    const Report counted = report();
    std::uint64_t bytes = 0;
    for (const char* name : {"k", "v", "k scales", "v scales"}) {
      bytes += 32 * counted.buffer(name).sectors_read;
    }
    const std::size_t row = size(shape.head_dim) * element_bytes(shape.format) + scale_bytes(shape.format);
    const double floor = static_cast<double>(2 * kHeads * 4096 * row);
    CHECK(static_cast<double>(bytes) <= 1.05 * floor);
    LineCount busiest{};  // the queries, for each of a warp's keys
    for (const LineCount& line : counted.lines) {
      if (line.op != Op::kSharedLoad && line.op != Op::kSharedStore) continue;
      CHECK(line.wavefronts <= 2 * line.least_wavefronts);
      if (line.requests > busiest.requests) busiest = line;
    }
    CHECK(busiest.requests >= static_cast<std::uint64_t>(kHeads * 4096 / 16 * shape.head_dim / 16));
    CHECK(busiest.wavefronts == busiest.least_wavefronts);
  }
}

// Prefill attention against the same in double, row by row, from the bytes of the cache.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cuda/launch.h"
#include "cuda/prefill_attention.h"
#include "gguf/half.h"
#include "kv/ring.h"
#include "kv/rotation.h"
#include "kv/row.h"
#include "random_shapes.h"
#include "simt/helpers.h"
#include "simt/simt.h"

using namespace ringlm;
using namespace ringlm::cuda;

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Case {
  int head_dim, group, n_head_kv, M;
  std::int64_t position;                // of the first row
  std::int64_t visible, pinned, epoch;  // the epoch a multiple of 64
  KvFormat k_format = KvFormat::Int8, v_format = KvFormat::Int8;
  bool offsets = false;
  float softcap = 0.0f;
  float v_size = 1.0f;  // of values
  int chunk = 0;        // of the ring; M where 0
};

// Everything on the device, and what it has to give.
struct Problem {
  Case c;
  kv::Ring ring;
  std::vector<float> q, q_pinned, offsets;
  std::vector<std::uint8_t> k, v;
  std::vector<std::uint16_t> k_scales, v_scales;
  std::vector<double> expected;
  std::vector<double> largest_v;  // by KV head: of any seen value
  simt::BufferCount of_k{};       // by the last run

  int n_head() const { return c.group * c.n_head_kv; }

  // Row `slot` of a head, in double, as it is stored.
  std::vector<double> row(const std::vector<std::uint8_t>& rows, const std::vector<std::uint16_t>& scales,
                          KvFormat format, std::int64_t head, std::int64_t slot) const {
    std::vector<double> x(size(c.head_dim));
    const std::size_t at = size(head * ring.capacity + slot);
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (format == KvFormat::Int8) {
        const int code = rows[at * x.size() + i] - 128;
        x[i] = code * static_cast<double>(f16_to_f32(scales[at]));
      } else {
        std::uint16_t half;
        std::memcpy(&half, &rows[(at * x.size() + i) * 2], sizeof half);
        x[i] = f16_to_f32(half);
      }
    }
    return x;
  }

  explicit Problem(const Case& c_, unsigned seed) : c(c_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const int chunk = std::max(c.chunk, c.M);
    ring = {c.visible, c.pinned, c.visible + chunk - 1};
    const std::size_t dim = size(c.head_dim), rows = size(c.n_head_kv * ring.capacity);
    const auto fill = [&](std::vector<float>& x, std::size_t n) {
      x.resize(n);
      for (float& value : x) value = normal(random);
    };
    fill(q, size(c.M) * size(n_head()) * dim);
    fill(q_pinned, q.size());
    if (c.offsets) fill(offsets, size(c.M) * size(n_head()) * kEpochs);
    for (float& x : offsets) x *= 6.0f;

    // Slots that no position has come to hold what the allocation did: here, NaN.
    const auto make_rows = [&](KvFormat format, float magnitude, std::vector<std::uint8_t>& bytes,
                               std::vector<std::uint16_t>& scales) {
      bytes.assign(rows * dim * element_bytes(format), 0xff);
      scales.assign(format == KvFormat::Int8 ? rows : 0, 0xffff);
      std::vector<float> x(dim);
      const std::int64_t last = c.position + c.M - 1;
      for (std::int64_t p = 0; p <= last; ++p) {
        const std::int64_t slot = ring.slot(p);
        for (std::int64_t h = 0; h < c.n_head_kv; ++h) {
          // Rows of very different sizes, among them zero.
          const float of_row = magnitude * (p % 11 == 5 ? 0.0f : std::exp2(static_cast<float>(p % 5) - 2.0f));
          for (float& value : x) value = of_row * normal(random);
          const std::size_t at = size(h * ring.capacity + slot);
          if (format == KvFormat::Int8) {
            std::uint8_t scale[2];
            kv::store_int8(x.data(), &bytes[at * dim], scale, c.head_dim);
            std::memcpy(&scales[at], scale, 2);
          } else {
            for (std::size_t i = 0; i < dim; ++i) {
              const std::uint16_t half = f32_to_f16(x[i]);
              std::memcpy(&bytes[(at * dim + i) * 2], &half, 2);
            }
          }
        }
      }
    };
    make_rows(c.k_format, 1.0f, k, k_scales);
    make_rows(c.v_format, c.v_size, v, v_scales);

    const double scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
    expected.resize(q.size());
    largest_v.assign(size(c.n_head_kv), 0.0);
    for (std::int64_t m = 0; m < c.M; ++m) {
      const std::int64_t p = c.position + m;
      for (std::int64_t h = 0; h < n_head(); ++h) {
        const std::int64_t query = m * n_head() + h, head_kv = h / c.group;
        std::vector<double> score, sum(dim);
        std::vector<std::int64_t> seen;
        for (std::int64_t t = 0; t <= p; ++t) {
          const bool is_pinned = t < c.pinned;
          if (!is_pinned && p - t >= c.visible - c.pinned) continue;
          seen.push_back(t);
          const auto key = row(k, k_scales, c.k_format, head_kv, ring.slot(t));
          const std::vector<float>& from = is_pinned ? q_pinned : q;
          double product = 0.0;
          for (std::size_t i = 0; i < dim; ++i) product += key[i] * from[size(query) * dim + i];
          const std::size_t epoch = is_pinned ? 2 : t / c.epoch == p / c.epoch ? 0 : 1;
          if (c.offsets) product += offsets[size(query) * kEpochs + epoch];
          product *= scale;
          score.push_back(c.softcap > 0.0f ? c.softcap * std::tanh(product / c.softcap) : product);
        }
        const double largest = *std::max_element(score.begin(), score.end());
        double total = 0.0;
        for (std::size_t i = 0; i < seen.size(); ++i) {
          const double weight = std::exp(score[i] - largest);
          const auto value = row(v, v_scales, c.v_format, head_kv, ring.slot(seen[i]));
          total += weight;
          for (std::size_t j = 0; j < dim; ++j) {
            sum[j] += weight * value[j];
            largest_v[size(head_kv)] = std::max(largest_v[size(head_kv)], std::fabs(value[j]));
          }
        }
        std::vector<float> turned(dim);
        for (std::size_t j = 0; j < dim; ++j) turned[j] = static_cast<float>(sum[j] / total);
        if (c.v_format == KvFormat::Int8) kv::rotate_back(kv::make_rotation(c.head_dim), turned.data());
        std::copy(turned.begin(), turned.end(), expected.begin() + query * c.head_dim);
      }
    }
  }

  // The largest error of any element, in parts of the largest |v| of its head.
  double run() {
    const auto bytes = [](const std::vector<std::uint16_t>& x) {
      std::vector<std::uint8_t> b(2 * x.size());
      if (!b.empty()) std::memcpy(b.data(), x.data(), b.size());
      return b;
    };
    simt::Buffer<std::uint8_t> k_device("k", k), v_device("v", v),
        k_scales_device("k scales", bytes(k_scales)), v_scales_device("v scales", bytes(v_scales));
    simt::Buffer<float> q_device("q", q), q_pinned_device("q_pinned", q_pinned),
        offsets_device("offsets", offsets), att("att", q.size());
    simt::Buffer<KvLayer> layers("layers", 2);
    layers[0] = {};  // another layer
    layers[1] = {k_device.data(),
                 v_device.data(),
                 c.k_format == KvFormat::Int8 ? k_scales_device.data() : nullptr,
                 c.v_format == KvFormat::Int8 ? v_scales_device.data() : nullptr,
                 ring.visible,
                 ring.pinned,
                 ring.capacity};
    simt::Buffer<DeviceRow> rows("rows", size(c.M));
    for (int m = 0; m < c.M; ++m) rows[size(m)] = {c.position + m, c.epoch, layers.data(), 0};

    Attend a{};
    a.rows = rows.data();
    a.M = c.M;
    a.layer = 1;
    a.q = q_device.data();
    a.q_pinned = q_pinned_device.data();
    a.offsets = c.offsets ? offsets_device.data() : nullptr;
    a.n_head = n_head();
    a.n_head_kv = c.n_head_kv;
    a.head_dim = c.head_dim;
    a.k_format = c.k_format;
    a.v_format = c.v_format;
    a.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
    a.softcap = c.softcap;
    a.att = att.data();
    prefill_attention(a, nullptr);

    double worst = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::size_t head = i / size(c.head_dim) % size(n_head()) / size(c.group);
      const double error = std::fabs(att[i] - expected[i]) / largest_v[head];
      worst = simt::larger(worst, error);
    }
    CHECK(simt::report().bypasses == 0);
    if (!simt::kHardware) of_k = simt::report().buffer("k");
    return worst;
  }
};

// What the roundings to half give: of queries and values 2^-11 each, of P 2^-11 of its row's largest.
constexpr double kTolerance = 2e-3;

void check(const Case& c, unsigned seed) {
  CAPTURE(c.head_dim);
  CAPTURE(c.group);
  CAPTURE(c.M);
  CAPTURE(c.position);
  CAPTURE(c.visible);
  CAPTURE(c.pinned);
  CAPTURE(static_cast<int>(c.k_format));
  CAPTURE(static_cast<int>(c.v_format));
  CAPTURE(c.offsets);
  CAPTURE(c.softcap);
  CHECK(Problem(c, seed).run() < kTolerance);
}

constexpr KvFormat kInt8 = KvFormat::Int8, kF16 = KvFormat::F16;

}  // namespace

TEST_CASE("prefill attention: head sizes, groups and formats") {
  check({64, 1, 2, 64, 0, 128, 0, 128}, 1);
  check({64, 2, 1, 33, 0, 40, 0, 64, kF16, kF16}, 2);
  check({80, 3, 1, 23, 50, 70, 4, 128}, 3);
  check({80, 1, 2, 9, 50, 70, 4, 128, kInt8, kF16}, 4);
  check({96, 5, 1, 13, 90, 64, 8, 64}, 5);
  check({96, 12, 1, 6, 10, 64, 0, 64, kF16, kInt8}, 6);
  check({128, 7, 1, 10, 77, 96, 16, 128}, 7);
  check({128, 8, 1, 8, 200, 100, 0, 128, kF16, kF16}, 8);
  check({256, 2, 1, 32, 30, 64, 5, 64}, 9);
  check({256, 4, 1, 5, 100, 48, 0, 64, kF16, kF16}, 10);
}

TEST_CASE("prefill attention: rows around the borders of tiles and blocks") {
  unsigned seed = 20;
  for (const int M : {1, 15, 16, 17, 63, 65, 70}) check({64, 1, 1, M, 60, 80, 0, 128}, ++seed);
  for (const int M : {1, 21, 22})
    check({64, 3, 1, M, 63, 200, 0, 256}, ++seed);  // 22: two tokens share a block's border
}

TEST_CASE("prefill attention: rings") {
  unsigned seed = 40;
  // Positions before, at and after the end of the pinned ones; a wrap inside of the chunk; a window; a chunk
  // of the ring that is larger than M; one moving position alone.
  for (const std::int64_t position : {0, 5, 12, 13, 90, 101, 102, 110, 333}) {
    check({64, 2, 1, 20, position, 82, 13, 128}, ++seed);
  }
  for (const std::int64_t position : {31, 64, 95, 1000}) check({64, 2, 1, 20, position, 33, 0, 64}, ++seed);
  check({128, 4, 1, 9, 500, 64, 33, 64, kInt8, kInt8, true, 0.0f, 1.0f, 40}, ++seed);
  check({128, 4, 1, 3, 500, 34, 33, 64, kInt8, kInt8, true}, ++seed);
  check({64, 1, 1, 70, 100, 1, 0, 64}, ++seed);
}

TEST_CASE("prefill attention: offsets of centred keys, soft caps, small and large values") {
  unsigned seed = 60;
  for (const std::int64_t position : {40, 120, 128, 250}) {  // epochs within the chunk and before it
    check({64, 2, 1, 17, position, 64, 6, 64, kInt8, kInt8, true}, ++seed);
    check({128, 2, 1, 17, position, 64, 0, 128, kInt8, kF16, true, 3.0f}, ++seed);
  }
  check({80, 2, 1, 17, 30, 64, 6, 64, kF16, kF16, false, 2.0f}, ++seed);
  for (const float v_size : {1e-3f, 2e3f}) {
    check({64, 2, 1, 17, 30, 64, 6, 64, kInt8, kInt8, false, 0.0f, v_size}, ++seed);
  }
}

TEST_CASE("prefill attention: random shapes") {
  shapes::Choice choice(2);
  for (int i = 0; i < shapes::kMany; ++i) {
    CAPTURE(i);
    Case c{};
    c.head_dim = choice.one_of({64, 80, 96, 128, 256});
    c.group = choice.between(1, 12);
    c.n_head_kv = choice.between(1, 2);
    c.M = choice.one_of({1, choice.between(2, 20), choice.between(2, 70)});
    c.position =
        choice.one_of<std::int64_t>({0, choice.between(0, 400), 64 * choice.between(1, 5) - 1, 2000});
    c.visible = choice.one_of<std::int64_t>({1, 64, 65, choice.between(1, 200)});
    c.pinned = choice.once_in(2) ? choice.between(std::int64_t{0}, c.visible - 1) : 0;
    c.epoch = (c.visible + 63) / 64 * 64;
    c.k_format = choice.one_of({kInt8, kF16});
    c.v_format = choice.one_of({kInt8, kF16});
    c.offsets = c.k_format == kInt8 && choice.once_in(2);
    c.softcap = choice.once_in(3) ? 2.0f : 0.0f;
    c.chunk = c.M + choice.between(0, 10);
    simt::in_one_order(static_cast<unsigned>(i), [&] { check(c, 1000 + static_cast<unsigned>(i)); });
  }
}

TEST_CASE("prefill attention: every order") {
  Problem pinned({64, 3, 2, 25, 70, 60, 9, 64, kInt8, kInt8, true, 20.0f}, 80);
  Problem halves({80, 2, 1, 9, 40, 64, 3, 64, kF16, kF16}, 81);
  simt::in_every_order([&] {
    CHECK(pinned.run() < kTolerance);
    CHECK(halves.run() < kTolerance);
  });
}

TEST_CASE("prefill attention: sectors and bank conflicts" * doctest::skip(simt::kHardware)) {
  for (const int head_dim : {64, 80, 96, 128, 256}) {
    for (const KvFormat format : {kInt8, kF16}) {
      Problem problem({head_dim, 4, 1, 16, 192, 256, 64, 256, format, format}, 90);
      simt::reset_report();
      CHECK(problem.run() < kTolerance);
      int lines = 0;
      for (const simt::LineCount& line : simt::report().lines) {
        if (line.file != "prefill_attention.h") continue;
        CAPTURE(line.line);
        ++lines;
        // Rows of 80 and 96 elements are not whole turns of the banks: stores that cross from one to the
        // next.
        CHECK(line.wavefronts <= line.least_wavefronts * (head_dim % 64 == 0 ? 1 : 2));
        if (line.requests > 100) CHECK(line.sectors <= line.least_sectors * 5 / 4);
      }
      CHECK(lines > 10);
      // Every byte of the rows that a block sees, once: 208 positions, a block.
      CHECK(problem.of_k.bytes_read == problem.of_k.unique_read);
      CHECK(problem.of_k.unique_read == 208 * size(head_dim) * element_bytes(format));
    }
  }
}

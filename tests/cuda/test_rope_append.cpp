// rope_append against ops/reference.cpp, and its rows against kv::store_row of its own floats, bit for bit.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cuda/launch.h"
#include "cuda/rotation.h"
#include "kv/cache.h"
#include "model/rope.h"
#include "ops/reference.h"
#include "random_shapes.h"
#include "simt/helpers.h"

using namespace ringlm;
using simt::Buffer;

namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> random_floats(std::int64_t n, unsigned seed, float around = 0.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(around);
  std::vector<float> values(size(n));
  for (float& v : values) v = normal(random);
  return values;
}

struct Shape {
  std::int32_t n_head, n_head_kv, head_dim, rope_dims;
  RopePairing pairing;
  QkNorm norm;
  KvFormat k, v;
  bool bias, rope;
};

constexpr std::int32_t kLayers = 2, kLayer = 1;
constexpr std::uint8_t kUntouched = 0xab;

// A cache in memory of the host, and the same in that of the device.
struct Memory {
  kv::Layout layout;
  std::vector<std::byte> host;
  Buffer<std::uint8_t> device;
  std::vector<kv::Cache::Layer> host_layers, device_layers;
  kv::Cache host_cache, device_cache;
  Buffer<cuda::KvLayer> layers;

  Memory(const Shape& s, const std::vector<std::int32_t>& windows, std::int64_t n_ctx, std::int64_t pinned)
      : layout{kLayers, s.n_head_kv, s.head_dim, s.k, s.v, n_ctx, pinned, 4, windows},
        host(layout.nbytes(), std::byte{kUntouched}),
        device("rows of the ring", std::vector<std::uint8_t>(layout.nbytes(), kUntouched)),
        host_layers(kLayers),
        device_layers(kLayers),
        host_cache(layout, host, host_layers),
        device_cache(layout, {reinterpret_cast<std::byte*>(device.data()), device.size()}, device_layers),
        layers("layers", kLayers) {
    for (std::size_t i = 0; i < kLayers; ++i) {
      const kv::Cache::Layer& l = device_layers[i];
      layers[i] = {l.k, l.v, l.k_scales, l.v_scales, l.ring.visible, l.ring.pinned, l.ring.capacity};
    }
  }
};

struct Place {
  std::size_t memory;
  std::int64_t position;
};

// Three caches, one of which pins and one of whose layers have windows, and positions in all of them.
const std::vector<std::int32_t> kNoWindows = {0, 0}, kWindows = {0, 6};
const std::vector<Place> kPlaces = {{0, 3},       {0, 20}, {0, 1000003}, {0, (std::int64_t{1} << 31) + 17},
                                    {1, 1 << 20}, {1, 9},  {2, 1},       {2, (std::int64_t{1} << 33) + 5}};

float largest(std::span<const float> x) {
  float most = 0.0f;
  for (const float v : x) most = std::max(most, std::fabs(v));
  return most;
}

// Within a few roundings of the largest value of its head.
void check_heads(std::span<const float> got, std::span<const float> expected, std::int32_t head_dim,
                 const char* what) {
  CAPTURE(what);
  double worst = 0.0;
  for (std::size_t at = 0; at < got.size(); at += size(head_dim)) {
    const float most = largest(expected.subspan(at, size(head_dim)));
    for (std::size_t i = at; i < at + size(head_dim); ++i) {
      const double difference = std::fabs(static_cast<double>(got[i]) - expected[i]) / most;
      worst = difference <= worst ? worst : difference;  // NaN stays
    }
  }
  CHECK(worst < 1.5e-6);
}

bool untouched(std::span<const float> x) {
  return std::ranges::all_of(x, [](float v) { return std::bit_cast<std::uint32_t>(v) == 0xffffffffu; });
}

struct Outputs {
  std::vector<float> q, q_pinned, k, v, offsets;
};

// Everything that a step of this shape needs, on both sides.
struct Fixture {
  Shape s;
  Config c;
  LayerWeights w;
  std::vector<std::unique_ptr<Memory>> memories;
  std::int64_t M = static_cast<std::int64_t>(kPlaces.size());
  std::vector<float> q, k, v, own, pinned, epochs;
  bool centred;

  explicit Fixture(const Shape& shape) : s(shape) {
    c.n_layer = kLayers;
    c.n_head = s.n_head, c.n_head_kv = s.n_head_kv, c.head_dim = s.head_dim;
    c.rope_dims = s.rope_dims, c.rope_pairing = s.pairing;
    c.qk_norm = s.norm, c.norm_eps = 1e-5f;
    c.ropes.resize(1);
    c.rope_of = s.rope ? std::vector<std::int32_t>{0, 0} : std::vector<std::int32_t>{-1, -1};
    memories.push_back(std::make_unique<Memory>(s, kNoWindows, 24, 5));
    memories.push_back(std::make_unique<Memory>(s, kNoWindows, 16, 0));
    memories.push_back(std::make_unique<Memory>(s, kWindows, 24, 2));
    if (s.norm != QkNorm::None) {
      const bool full = s.norm == QkNorm::Full;
      w.q_norm = random_floats(full ? c.q_dim() : s.head_dim, 1, 1.0f);
      w.k_norm = random_floats(full ? c.kv_dim() : s.head_dim, 2, 1.0f);
    }
    centred = s.bias && s.k == KvFormat::Int8;
    w.keys_have_offset = s.bias;
    w.k_bias = random_floats(c.kv_dim(), 3, 4.0f);
    q = random_floats(M * c.q_dim(), 4);
    k = random_floats(M * c.kv_dim(), 5);
    v = random_floats(M * c.kv_dim(), 6);
    const auto shrink = [&](std::int64_t m, float by) {
      for (std::int64_t i = m * c.kv_dim(); i < (m + 1) * c.kv_dim(); ++i) v[size(i)] *= by;
    };
    shrink(5, 1e-4f), shrink(6, 1e-5f), shrink(7, 1e-9f);  // scales that are subnormal, or zero
    const std::size_t n = size(s.rope_dims);
    const RopeAngles angles = rope_angles(c.ropes[0], s.rope_dims, 0);
    own.resize(size(M) * n), pinned.resize(size(M) * n), epochs.resize(size(M) * n * kEpochs);
    for (std::size_t m = 0; m < size(M); ++m) {
      const kv::Layout& l = memories[kPlaces[m].memory]->layout;
      const std::int64_t p = kPlaces[m].position, epoch = p / l.epoch();
      rope_table(angles, p, std::span(own).subspan(m * n, n));
      rope_table(angles, std::min(p, l.n_ctx - 1), std::span(pinned).subspan(m * n, n));
      const std::int64_t of[] = {epoch, std::max<std::int64_t>(epoch - 1, 0), 0};
      for (std::size_t e = 0; e < kEpochs; ++e) {
        epoch_table(angles, of[e], l.epoch(), std::span(epochs).subspan((m * kEpochs + e) * n, n));
      }
    }
  }

  Outputs reference() {
    for (auto& memory : memories) std::ranges::fill(memory->host, std::byte{kUntouched});
    Outputs o{q, std::vector<float>(q.size()), k, v, std::vector<float>(size(M * s.n_head * kEpochs))};
    std::vector<Row> rows(size(M));
    for (std::size_t m = 0; m < rows.size(); ++m) {
      rows[m] = {0, kPlaces[m].position, &memories[kPlaces[m].memory]->host_cache, nullptr, nullptr, 0};
    }
    Activations a;
    a.q = o.q, a.q_pinned = o.q_pinned, a.k = o.k, a.v = o.v, a.offsets = o.offsets;
    a.angles[0] = {own, pinned, epochs};
    std::vector<std::uint8_t> bad(rows.size());
    make_reference_ops()->rope_append(c, w, kLayer, {rows, a, bad});
    return o;
  }

  Outputs kernel(std::vector<std::uint32_t>& bad) {
    for (auto& memory : memories) std::ranges::fill(memory->device, kUntouched);
    Buffer<cuda::DeviceRow> rows("rows", size(M));
    for (std::size_t m = 0; m < rows.size(); ++m) {
      Memory& memory = *memories[kPlaces[m].memory];
      rows[m] = {kPlaces[m].position, memory.layout.epoch(), memory.layers.data(), 0};
    }
    Buffer<float> q_("q", q), q_pinned_("q_pinned", q.size()), k_("k", k), v_("v", v), own_("own", own),
        pinned_("pinned", pinned), epochs_("epochs", epochs), k_bias("k_bias", w.k_bias),
        q_norm("q_norm", w.q_norm), k_norm("k_norm", w.k_norm),
        offsets("offsets", size(M * s.n_head * kEpochs));
    Buffer<std::uint32_t> bad_("bad", std::vector<std::uint32_t>(size(M), 0));
    const bool norm = s.norm != QkNorm::None;
    cuda::rope_append({.rows = rows.data(),
                       .M = static_cast<int>(M),
                       .layer = kLayer,
                       .q = q_.data(),
                       .q_pinned = q_pinned_.data(),
                       .k = k_.data(),
                       .v = v_.data(),
                       .q_norm = norm ? q_norm.data() : nullptr,
                       .k_norm = norm ? k_norm.data() : nullptr,
                       .qk_norm = s.norm,
                       .norm_eps = c.norm_eps,
                       .own = s.rope ? own_.data() : nullptr,
                       .pinned = s.rope ? pinned_.data() : nullptr,
                       .epochs = centred ? epochs_.data() : nullptr,
                       .rope_dims = s.rope_dims,
                       .pairing = s.pairing,
                       .k_bias = centred ? k_bias.data() : nullptr,
                       .offsets = centred ? offsets.data() : nullptr,
                       .n_head = s.n_head,
                       .n_head_kv = s.n_head_kv,
                       .head_dim = s.head_dim,
                       .k_format = s.k,
                       .v_format = s.v,
                       .bad = bad_.data()},
                      nullptr);
    bad.assign(bad_.begin(), bad_.end());
    const simt::Report r = simt::report();
    CHECK(r.bypasses == 0);
    CHECK(r.bypass_lines == std::vector<std::string>{});
    const auto all = [](Buffer<float>& b) { return std::vector<float>(b.begin(), b.end()); };
    return {all(q_), all(q_pinned_), all(k_), all(v_), all(offsets)};
  }

  // The device's memory is what kv::store_row makes of these floats; nothing else is written.
  void check_memory(const Outputs& got) {
    for (std::size_t i = 0; i < memories.size(); ++i) {
      Memory& memory = *memories[i];
      std::vector<std::byte> expected(memory.host.size(), std::byte{kUntouched});
      std::vector<kv::Cache::Layer> layers(kLayers);
      const kv::Cache cache(memory.layout, expected, layers);
      for (std::size_t m = 0; m < size(M); ++m) {
        if (kPlaces[m].memory != i) continue;
        const std::int64_t slot = cache.ring(kLayer).slot(kPlaces[m].position);
        for (std::int32_t h = 0; h < s.n_head_kv; ++h) {
          const std::size_t at = (m * size(s.n_head_kv) + size(h)) * size(s.head_dim);
          kv::store_row(cache.k(kLayer, h), slot, &got.k[at], s.head_dim);
          kv::store_row(cache.v(kLayer, h), slot, &got.v[at], s.head_dim);
        }
      }
      CHECK(std::memcmp(expected.data(), memory.device.data(), expected.size()) == 0);
    }
  }

  // Against the rows that the reference stored: INT8 codes differ where a rounding falls the other way.
  void check_codes() {
    std::int64_t differ = 0, all = 0;
    for (std::size_t m = 0; m < size(M); ++m) {
      const Memory& memory = *memories[kPlaces[m].memory];
      const std::int64_t slot = memory.host_cache.ring(kLayer).slot(kPlaces[m].position);
      for (std::int32_t h = 0; h < s.n_head_kv; ++h) {
        for (const bool key : {true, false}) {
          const kv::Rows a = key ? memory.host_cache.k(kLayer, h) : memory.host_cache.v(kLayer, h);
          const kv::Rows b = key ? memory.device_cache.k(kLayer, h) : memory.device_cache.v(kLayer, h);
          if (a.format != KvFormat::Int8) continue;
          for (std::int64_t i = slot * s.head_dim; i < (slot + 1) * s.head_dim; ++i) {
            const int difference = std::abs(a.data[i] - b.data[i]);
            CHECK(difference <= 1);
            differ += difference, ++all;
          }
        }
      }
    }
    CHECK(differ * 200 <= all);
  }
};

void check_shape(const Shape& shape) {
  Fixture f(shape);
  const Outputs expected = f.reference();
  simt::in_every_order([&] {
    std::vector<std::uint32_t> bad;
    const Outputs got = f.kernel(bad);
    CHECK(bad == std::vector<std::uint32_t>(size(f.M), 0));
    check_heads(got.q, expected.q, shape.head_dim, "q");
    check_heads(got.k, expected.k, shape.head_dim, "k");
    check_heads(got.v, expected.v, shape.head_dim, "v");
    const std::size_t width = size(f.c.q_dim());
    for (std::size_t m = 0; m < size(f.M); ++m) {
      const bool pins = kPlaces[m].memory == 0;
      const std::span<const float> second = std::span(got.q_pinned).subspan(m * width, width);
      if (pins) {
        check_heads(second, std::span(expected.q_pinned).subspan(m * width, width), shape.head_dim, "second");
      } else {
        CHECK(untouched(second));
      }
      for (std::size_t h = 0; h < size(shape.n_head); ++h) {
        for (std::size_t e = 0; e < kEpochs; ++e) {
          const std::size_t at = (m * size(shape.n_head) + h) * kEpochs + e;
          if (!f.centred || (e == kOfPinned && !pins)) {
            CHECK(untouched({&got.offsets[at], 1}));
          } else {
            // Sums of head_dim products of a bias of about 4.
            CHECK(got.offsets[at] == doctest::Approx(expected.offsets[at]).epsilon(1e-6).scale(100.0));
          }
        }
      }
    }
    f.check_memory(got);
    f.check_codes();
  });
}

constexpr auto kHalves = RopePairing::Halves;
constexpr auto kInterleaved = RopePairing::Interleaved;
constexpr auto kInt8 = KvFormat::Int8;
constexpr auto kF16 = KvFormat::F16;

}  // namespace

TEST_CASE("heads of 64, a norm of each, keys with a bias") {
  check_shape({6, 2, 64, 64, kHalves, QkNorm::Head, kInt8, kInt8, true, true});
}
TEST_CASE("heads of 128, interleaved pairs in a part of them, halves stored") {
  check_shape({5, 5, 128, 96, kInterleaved, QkNorm::None, kF16, kF16, true, true});
}
TEST_CASE("heads of 80, a norm over all, pairs across lanes, a partial turn") {
  check_shape({4, 2, 80, 40, kHalves, QkNorm::Full, kInt8, kF16, true, true});
}
TEST_CASE("heads of 96, no turn at all") {
  check_shape({3, 1, 96, 96, kHalves, QkNorm::Head, kInt8, kInt8, false, false});
}
TEST_CASE("heads of 256 and keys in float32") {
  check_shape({2, 1, 256, 256, kInterleaved, QkNorm::Head, kInt8, kInt8, true, true});
  check_shape({9, 3, 16, 8, kHalves, QkNorm::Full, KvFormat::F32, kInt8, true, true});
}
TEST_CASE("head sizes whose rotation has several blocks, or an order of 12 or 20 beyond 96") {
  for (const std::int32_t d : {48, 112, 160, 192, 240}) {
    CAPTURE(d);
    check_shape({2, 1, d, d, kHalves, QkNorm::None, kInt8, kInt8, false, true});
  }
}

TEST_CASE("random shapes") {
  shapes::Choice choice(5);
  for (int i = 0; i < shapes::kMany / 2; ++i) {
    CAPTURE(i);
    const std::int32_t n_head_kv = choice.between(1, 3), head_dim = choice.one_of({64, 80, 96, 128, 256});
    const bool turns = !choice.once_in(4), bias = turns && choice.once_in(2);
    check_shape({n_head_kv * choice.between(1, 5), n_head_kv, head_dim, 2 * choice.between(1, head_dim / 2),
                 choice.one_of({kHalves, kInterleaved}),
                 choice.one_of({QkNorm::None, QkNorm::Head, QkNorm::Full}), choice.one_of({kInt8, kF16}),
                 choice.one_of({kInt8, kF16}), bias, turns});
  }
}

TEST_CASE("rows whose keys or values do not fit are named, by formats") {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN(), infinity = HUGE_VALF;
  for (const KvFormat format : {kF16, kInt8, KvFormat::F32}) {
    Fixture f({2, 2, 64, 64, kHalves, QkNorm::None, format, format, false, false});
    const bool in_half = format == kF16, exact = format == KvFormat::F32;
    const auto row = [&](std::vector<float>& x, std::size_t m) { return x.data() + m * size(f.c.kv_dim()); };
    // 1.0 in one place becomes 1/8 in every place of a rotated row.
    const float limit = 127.0f * std::nextafterf(65520.0f, 0.0f) * 8.0f;
    std::fill_n(row(f.k, 1), f.c.kv_dim(), 0.0f);
    std::fill_n(row(f.v, 3), f.c.kv_dim(), 0.0f);
    row(f.k, 0)[77] = nan;
    row(f.k, 1)[3] = in_half || exact ? std::nextafterf(65520.0f, 0.0f) : limit;
    row(f.k, 2)[5] = in_half ? -65520.0f : exact ? -infinity : -1.01f * limit;
    row(f.v, 3)[0] = in_half ? 65519.0f : exact ? 3e38f : 0.99f * limit;
    row(f.v, 4)[127] = infinity;
    row(f.v, 5)[64] = nan;
    std::vector<std::uint32_t> bad;
    const Outputs got = f.kernel(bad);
    CHECK(bad == std::vector<std::uint32_t>{1, 0, 1, 0, 1, 1, 0, 0});
    f.check_memory(got);
  }
}

namespace {

using namespace ringlm::cuda;

template <int kOrder>
__global__ void rotate_both_ways(float* forward, float* back, kv::Rotation r) {
  SMEM_STATIC(float, scratch, 256);
  const int lane = static_cast<int>(threadIdx.x);
  float x[8] = {}, y[8] = {};
  for (int j = 0; j < 8; ++j) {
    if (lane + 32 * j >= r.head_dim) continue;
    x[j] = ld_global(forward + lane + 32 * j);
    y[j] = ld_global(back + lane + 32 * j);
  }
  rotate<kOrder>(r, x, scratch);
  rotate_back<kOrder>(r, y, scratch);
  for (int j = 0; j < 8; ++j) {
    if (lane + 32 * j >= r.head_dim) continue;
    st_global(forward + lane + 32 * j, x[j]);
    st_global(back + lane + 32 * j, y[j]);
  }
}

}  // namespace

TEST_CASE("the rotation, both ways, has the bits of kv::rotate") {
  for (std::int32_t d = 16; d <= 256; d += 16) {
    CAPTURE(d);
    const kv::Rotation r = kv::make_rotation(d), same = rotation_of(d);
    CHECK(same.head_dim == r.head_dim);
    CHECK(same.m == r.m);
    CHECK(same.width == r.width);
    const std::vector<float> values = random_floats(d, 8);
    std::vector<float> x = values, y = values;
    kv::rotate(r, x.data());
    kv::rotate_back(r, y.data());
    simt::in_every_order([&] {
      Buffer<float> forward("forward", values), back("back", values);
      if (r.m == 1) LAUNCH(rotate_both_ways<1>, 1, 32, 0, nullptr, forward.data(), back.data(), r);
      if (r.m == 12) LAUNCH(rotate_both_ways<12>, 1, 32, 0, nullptr, forward.data(), back.data(), r);
      if (r.m == 20) LAUNCH(rotate_both_ways<20>, 1, 32, 0, nullptr, forward.data(), back.data(), r);
      CHECK(std::equal(x.begin(), x.end(), forward.begin()));
      CHECK(std::equal(y.begin(), y.end(), back.begin()));
    });
  }
}

// The inner loops of every instruction set that this machine runs, against plain loops in double.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "cpu/kernels.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "gguf/blocks.h"
#include "gguf/half.h"
#include "kernel_tests.h"
#include "model/rope.h"
#include "tiny_model.h"

using namespace ringlm;
using cpu::Kernels;
using cpu::kTile;
using cpu::Partial;
using gguf::DType;

namespace {

// By the definition of binary16.
double half_value(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? std::nan("") : sign * HUGE_VAL;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

}  // namespace

TEST_CASE("the chosen set is one that the processor runs") {
  bool found = false;
  for (const Kernels* k : cpu::runnable_kernels()) found |= k == &cpu::kernels();
  CHECK(found);
}

TEST_CASE("every half turns into its value, exactly") {
  for (std::uint32_t h = 0; h < 65536; ++h) {
    const float found = f16_to_f32(static_cast<std::uint16_t>(h));
    const double expected = half_value(static_cast<std::uint16_t>(h));
    if (std::isnan(expected)) {
      REQUIRE(std::isnan(found));
    } else {
      REQUIRE(static_cast<double>(found) == expected);
      REQUIRE(std::signbit(found) == std::signbit(expected));
    }
  }
}

TEST_CASE("attention reads every half exactly") {
  for_each_isa([](const Kernels& k) {
    for (const std::int32_t d : {7, 16, 64}) {
      std::vector<float> q(size(d)), sum(size(cpu::state_width(d))), out(size(d));
      std::vector<float> workspace(cpu::workspace_floats(d, 1));
      std::vector<std::uint16_t> key(size(d)), value(size(d));
      for (std::uint32_t first = 0; first < 65536; first += static_cast<std::uint32_t>(d)) {
        for (std::uint32_t i = 0; i < value.size(); ++i) value[i] = static_cast<std::uint16_t>(first + i);
        Partial part;
        const kv::Rows keys{KvFormat::F16, reinterpret_cast<std::uint8_t*>(key.data()), nullptr};
        const kv::Rows values{KvFormat::F16, reinterpret_cast<std::uint8_t*>(value.data()), nullptr};
        const cpu::Range one{0, 1};
        k.prepare_queries({q.data(), 0, 1, 1, d, 1.0f, KvFormat::F16}, workspace.data());
        k.attend_span({1, d, 1.0f, 0.0f, keys, values, one, &one, 0, 1, 0, nullptr, nullptr},
                      workspace.data(), &part, sum.data());
        k.finish(part, sum.data(), out.data(), d);
        for (std::uint32_t i = 0; i < value.size(); ++i) {
          const double expected = half_value(value[i]);
          if (std::isnan(expected)) {
            REQUIRE(std::isnan(out[i]));
          } else {
            REQUIRE(static_cast<double>(out[i]) == expected);
          }
        }
      }
    }
  });
}

TEST_CASE("halves are rounded to nearest, ties to even") {
  for_each_isa([](const Kernels& k) {
    const auto round = [&](float x) {
      std::uint16_t h = 0;
      k.store_row({KvFormat::F16, reinterpret_cast<std::uint8_t*>(&h), nullptr}, 0, &x, 1);
      return h;
    };
    for (std::uint16_t h = 0; h < 0x7c00; ++h) {  // every finite positive half and the middle to the next
      const float value = static_cast<float>(half_value(h));
      REQUIRE(round(value) == h);
      REQUIRE(round(-value) == (h | 0x8000));
      const double next = h + 1 == 0x7c00 ? 65536.0 : half_value(static_cast<std::uint16_t>(h + 1));
      const float middle = static_cast<float>((half_value(h) + next) / 2);  // exact
      REQUIRE(round(middle) == h + (h & 1));
      REQUIRE(round(std::nextafter(middle, 0.0f)) == h);
      REQUIRE(round(std::nextafter(middle, kInf)) == h + 1);
    }
    CHECK(round(kInf) == 0x7c00);
    CHECK(round(-kInf) == 0xfc00);
    CHECK(round(1e38f) == 0x7c00);
    CHECK(round(1e-40f) == 0);
    CHECK(round(-0.0f) == 0x8000);
    const std::uint16_t nan = round(kNaN);
    CHECK((nan & 0x7c00) == 0x7c00);
    CHECK((nan & 0x03ff) != 0);
  });
}

TEST_CASE("e^x to two units in the last place, from 0 down to where it is clamped") {
  for_each_isa([](const Kernels& k) {
    // Merging a state of one position into a later one scales it by e^(difference of the largest scores).
    const auto exp = [&](float x) {
      Partial into{x, 1.0f};
      std::vector<float> sum(64, 1.0f), none(64);
      k.merge(into, sum.data(), {0.0f, 0.0f}, none.data(), 64);
      return into.total;
    };
    double worst = 0.0;
    for (int i = 0; i <= 87000; ++i) {
      const float x = -static_cast<float>(i) / 1000.0f;
      const double expected = std::exp(static_cast<double>(x));
      worst = std::max(worst, std::fabs(static_cast<double>(exp(x)) - expected) / expected);
    }
    CHECK(worst < 2.0 * 0x1p-23);
    CHECK(exp(0.0f) == 1.0f);
    CHECK(exp(-1000.0f) <= 1.7e-38f);
    CHECK(exp(-kInf) <= 1.7e-38f);
    CHECK(std::isnan(exp(kNaN)));
  });
}

TEST_CASE("silu(gate) * up") {
  for_each_isa([](const Kernels& k) {
    for (const std::int64_t n : {1, 5, 16, 17, 64, 100}) {
      std::vector<float> gate = random_floats(size(n), 1, 30.0f);
      const std::vector<float> up = random_floats(size(n), 2), before = gate;
      k.silu_mul(gate.data(), up.data(), n);
      for (std::size_t i = 0; i < gate.size(); ++i) {
        const double g = before[i], expected = g / (1.0 + std::exp(-g)) * up[i];
        REQUIRE(gate[i] == doctest::Approx(expected).epsilon(1e-6));
      }
    }
    std::vector<float> special = {kNaN, kInf, 1.0f, -100.0f, 100.0f};
    const std::vector<float> up = {1.0f, 1.0f, kNaN, 1.0f, 1.0f};
    k.silu_mul(special.data(), up.data(), 5);
    CHECK(std::isnan(special[0]));
    CHECK(special[1] == kInf);
    CHECK(std::isnan(special[2]));
    CHECK(std::fabs(special[3]) < 1e-35f);
    CHECK(special[4] == 100.0f);
  });
}

TEST_CASE("GELU by tanh, and soft caps") {
  for_each_isa([](const Kernels& k) {
    for (const std::int64_t n : {1, 16, 17, 100}) {
      std::vector<float> gate = random_floats(size(n), 1, 6.0f);
      const std::vector<float> up = random_floats(size(n), 2), before = gate;
      k.gelu_mul(gate.data(), up.data(), n);
      for (std::size_t i = 0; i < gate.size(); ++i) {
        const double g = before[i], u = std::sqrt(2.0 / std::numbers::pi) * (g + 0.044715 * g * g * g);
        const double expected = 0.5 * g * (1.0 + std::tanh(u)) * up[i];
        REQUIRE(std::fabs(gate[i] - expected) < 1e-6 * std::max(1.0, std::fabs(expected)));
      }
      for (const float cap : {0.0f, 0.5f, 30.0f}) {
        std::vector<float> x = before;
        k.soft_cap(x.data(), n, 2.0f, cap);
        for (std::size_t i = 0; i < x.size(); ++i) {
          const double scaled = 2.0 * before[i], c = cap;
          const double expected = c == 0.0 ? scaled : c * std::tanh(scaled / c);
          REQUIRE(std::fabs(x[i] - expected) < 3e-7 * std::max(1.0, c));
        }
      }
    }
    std::vector<float> special = {kNaN, 1e30f, -1e30f, 0.0f};
    k.soft_cap(special.data(), 4, 1.0f, 5.0f);
    CHECK(std::isnan(special[0]));
    CHECK(special[1] == 5.0f);
    CHECK(special[2] == -5.0f);
    CHECK(special[3] == 0.0f);
  });
}

TEST_CASE("RMSNorm") {
  for_each_isa([](const Kernels& k) {
    for (const std::int32_t n : {1, 2, 15, 16, 17, 40, 1000}) {
      const std::vector<float> x = random_floats(size(n), 3, 5.0f), w = random_floats(size(n), 4);
      std::vector<float> y(size(n));
      k.rms_norm(x.data(), w.data(), 1e-5f, y.data(), n);
      double squares = 0.0;
      for (const float v : x) squares += static_cast<double>(v) * v;
      for (std::size_t i = 0; i < y.size(); ++i) {
        const double expected = w[i] * x[i] / std::sqrt(squares / n + static_cast<double>(1e-5f));
        REQUIRE(y[i] == doctest::Approx(expected).epsilon(2e-6));
      }
    }
    const std::vector<float> ones(20, 1.0f);
    std::vector<float> y(20);
    k.rms_norm(std::vector<float>(20, 0.0f).data(), ones.data(), 1e-5f, y.data(), 20);
    CHECK(y == std::vector<float>(20, 0.0f));
    for (const float bad : {kNaN, kInf, 1e30f}) {  // the last one's square overflows
      std::vector<float> x(20, 1.0f);
      x[17] = bad;
      k.rms_norm(x.data(), ones.data(), 1e-5f, y.data(), 20);
      CHECK(std::isnan(y[17]));
    }
  });
}

namespace {

// Tokens at the last positions of n, each seeing up to `window` positions. A position's row lies in slot
// (position + shift) mod n, so that a span may wrap.
struct Attention {
  std::int32_t group, d, n;
  KvFormat k_format, v_format;
  std::int32_t tokens = 1, window = 1 << 20, shift = 0;
  std::vector<float> q, k, v, offsets;  // [tokens, group, d], [n, d] twice, [tokens * group]

  Attention(std::int32_t group_, std::int32_t d_, std::int32_t n_, KvFormat k_format_, KvFormat v_format_,
            std::int32_t tokens_ = 1, std::int32_t window_ = 1 << 20, std::int32_t shift_ = 0)
      : group(group_),
        d(d_),
        n(n_),
        k_format(k_format_),
        v_format(v_format_),
        tokens(tokens_),
        window(window_),
        shift(shift_),
        q(random_floats(size(tokens * group * d), 11, 3.0f)),
        k(random_floats(size(n * d), 12, 3.0f)),
        v(random_floats(size(n * d), 13)),
        offsets(random_floats(size(tokens * group), 14)) {}

  std::int32_t position(std::int32_t token) const { return n - tokens + token; }
  std::int32_t oldest(std::int32_t token) const { return std::max(0, position(token) - window + 1); }

  // The way of cpu/attention.cpp, in blocks of so many tokens: span by span, merged in order. Rows that no
  // query of a block sees are made NaN while it runs.
  std::vector<float> run(const Kernels& kernels, std::int32_t block = 1 << 20) const {
    std::vector<float> out;
    for (std::int32_t first = 0; first < tokens; first += block) {
      const std::vector<float> part = run_block(kernels, first, std::min(block, tokens - first));
      out.insert(out.end(), part.begin(), part.end());
    }
    return out;
  }

  std::vector<float> run_block(const Kernels& kernels, std::int32_t first_token, std::int32_t count) const {
    const std::int32_t begin = oldest(first_token), end = position(first_token + count - 1) + 1;
    std::vector<std::uint8_t> key_bytes(size(n * d) * element_bytes(k_format), 0xff),
        value_bytes(size(n * d) * element_bytes(v_format), 0xff), key_scales(size(2 * n), 0xff),
        value_scales(size(2 * n), 0xff);
    const kv::Rows keys{k_format, key_bytes.data(), key_scales.data()};
    const kv::Rows values{v_format, value_bytes.data(), value_scales.data()};
    for (std::int32_t t = begin; t < end; ++t) {
      kernels.store_row(keys, (t + shift) % n, &k[size(t * d)], d);
      kernels.store_row(values, (t + shift) % n, &v[size(t * d)], d);
    }
    const std::int32_t queries = count * group, width = cpu::state_width(d);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    std::vector<float> workspace(cpu::workspace_floats(d, queries), kNaN);
    kernels.prepare_queries({&q[size(first_token * group * d)], group * d, count, group, d, scale, k_format},
                            workspace.data());
    std::vector<Partial> parts(size(queries), {-kInf, 0.0f}), next = parts;
    std::vector<float> sums(size(queries * width)), next_sums = sums, out(size(queries * d));
    for (std::int32_t start = begin / cpu::kSpan * cpu::kSpan; start < end; start += cpu::kSpan) {
      const auto cut = [&](std::int32_t t) { return std::clamp(t - start, 0, cpu::kSpan); };
      std::vector<cpu::Range> seen;
      for (std::int32_t i = 0; i < queries; ++i) {
        const std::int32_t token = first_token + i / group;
        seen.push_back({cut(oldest(token)), cut(position(token) + 1)});
      }
      const cpu::Range all{cut(begin), cut(end)};
      const std::int32_t slot = (start + all.begin + shift) % n;
      std::vector<float> added;
      for (int tile = 0; tile < cpu::kSpan / kTile; ++tile) {
        added.insert(added.end(), offsets.begin() + first_token * group,
                     offsets.begin() + first_token * group + queries);
      }
      const cpu::SpanArgs args{queries, d,
                               scale,   0.0f,
                               keys,    values,
                               all,     seen.data(),
                               slot,    std::min(all.end, all.begin + n - slot),
                               0,       added.data(),
                               nullptr};
      kernels.attend_span(args, workspace.data(), next.data(), next_sums.data());
      for (std::int32_t i = 0; i < queries; ++i) {
        float *into = &sums[size(i * width)], *from = &next_sums[size(i * width)];
        const cpu::Range r = seen[size(i)];
        if (r.begin == r.end) {
          CHECK(next[size(i)].total == 0.0f);
        } else if (start <= oldest(first_token + i / group)) {
          parts[size(i)] = next[size(i)];
          std::copy_n(from, width, into);
        } else {
          kernels.merge(parts[size(i)], into, next[size(i)], from, width);
        }
      }
    }
    for (std::int32_t i = 0; i < queries; ++i)
      kernels.finish(parts[size(i)], &sums[size(i * width)], &out[size(i * d)], d);
    return out;
  }

  // What is stored of an element x of a row whose largest magnitude is m.
  static double stored(KvFormat format, float x, float m) {
    if (format == KvFormat::F32) return static_cast<double>(x);
    if (format == KvFormat::F16) return half_value(f32_to_f16(x));
    const double scale = half_value(f32_to_f16(m / 127.0f));
    return scale * std::nearbyint(static_cast<double>(x / static_cast<float>(scale)));
  }
  float largest(const std::vector<float>& rows, std::int32_t t) const {
    float m = 0.0f;
    for (std::int32_t i = 0; i < d; ++i) m = std::max(m, std::fabs(rows[size(t * d + i)]));
    return m;
  }

  std::vector<double> expected() const {
    std::vector<double> out(size(tokens * group * d)), p(size(n)), keys(size(n * d)), values(size(n * d));
    for (std::int32_t t = 0; t < n; ++t) {
      const float mk = largest(k, t), mv = largest(v, t);
      for (std::size_t i = size(t * d); i < size((t + 1) * d); ++i) {
        keys[i] = stored(k_format, k[i], mk);
        values[i] = stored(v_format, v[i], mv);
      }
    }
    for (std::int32_t g = 0; g < tokens * group; ++g) {
      const std::int32_t begin = oldest(g / group), end = position(g / group) + 1;
      double total = 0.0, most = -HUGE_VAL;
      for (std::int32_t t = begin; t < end; ++t) {
        double& score = p[size(t)] = static_cast<double>(offsets[size(g)]);
        for (std::int32_t i = 0; i < d; ++i) score += q[size(g * d + i)] * keys[size(t * d + i)];
        score /= std::sqrt(static_cast<double>(d));
        most = std::max(most, score);
      }
      for (std::int32_t t = begin; t < end; ++t) total += p[size(t)] = std::exp(p[size(t)] - most);
      for (std::int32_t t = begin; t < end; ++t) {
        for (std::int32_t i = 0; i < d; ++i)
          out[size(g * d + i)] += p[size(t)] / total * values[size(t * d + i)];
      }
    }
    return out;
  }
};

constexpr KvFormat kFormats[] = {KvFormat::F32, KvFormat::F16, KvFormat::Int8};

void check_attention(const Kernels& k, const Attention& a) {
  CAPTURE(a.group);
  CAPTURE(a.d);
  CAPTURE(a.n);
  CAPTURE(a.tokens);
  CAPTURE(a.window);
  CAPTURE(a.shift);
  CAPTURE(static_cast<int>(a.k_format));
  CAPTURE(static_cast<int>(a.v_format));
  const std::vector<float> found = a.run(k);
  const std::vector<double> expected = a.expected();
  double worst = 0.0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const double error = std::fabs(static_cast<double>(found[i]) - expected[i]);
    worst = error <= worst ? worst : error;  // NaN too
  }
  REQUIRE(worst < 3e-6);
  // Bit for bit the same however queries are put together.
  for (const std::int32_t block : {1, 2, 5}) {
    if (block < a.tokens) REQUIRE(same_bits(a.run(k, block), found));
  }
}

}  // namespace

TEST_CASE("attention in spans is attention") {
  for_each_isa([](const Kernels& k) {
    for (const KvFormat k_format : kFormats) {
      for (const KvFormat v_format : kFormats) {
        for (const std::int32_t d : {1, 7, 16, 20, 33, 64}) {
          for (const std::int32_t n : {1, 2, 17, 63, 64, 65, 200, 257, 600}) {
            check_attention(k, {d % 9 + 1, d, n, k_format, v_format, 1, 1 << 20, n / 3});
          }
        }
        for (const std::int32_t d : {64, 80, 96, 128, 256}) {
          for (const std::int32_t group : {1, 3, 4, 7})
            check_attention(k, {group, d, 70, k_format, v_format});
        }
      }
    }
  });
}

TEST_CASE("many queries at once see what each would alone") {
  for_each_isa([](const Kernels& k) {
    for (const KvFormat k_format : kFormats) {
      for (const KvFormat v_format : kFormats) {
        for (const std::int32_t d : {7, 64, 80}) {
          for (const std::int32_t group : {1, 3}) {
            check_attention(k, {group, d, 10, k_format, v_format, 10});
            check_attention(k, {group, d, 265, k_format, v_format, 11});
            check_attention(k, {group, d, 300, k_format, v_format, 9, 40, 130});   // windows
            check_attention(k, {group, d, 520, k_format, v_format, 12, 260, 77});  // one begins in a span
            check_attention(k, {group, d, 262, k_format, v_format, 12, 3, 250});   // that others do not see
          }
        }
      }
    }
  });
}

TEST_CASE("scores far apart neither overflow nor vanish") {
  for_each_isa([](const Kernels& k) {
    for (const KvFormat format : kFormats) {
      Attention a(1, 16, 400, format, format);
      for (const std::int32_t winner : {0, 70, 199, 399}) {
        for (std::size_t i = 0; i < a.k.size(); ++i)
          a.k[i] = static_cast<std::int32_t>(i / 16) == winner ? 1.0f : -1.0f;
        a.q.assign(16, 1000.0f);
        const std::vector<float> out = a.run(k);
        const float step = format == KvFormat::F32 ? 1e-6f : 1.0f / 200.0f;
        for (std::size_t i = 0; i < 16; ++i) CHECK(std::fabs(out[i] - a.v[size(winner) * 16 + i]) < step);
      }
    }
  });
}

TEST_CASE("rows of zeros are values like others") {
  for_each_isa([](const Kernels& k) {
    for (const KvFormat format : kFormats) {
      Attention a(2, 20, 100, format, format, 3);
      std::fill(a.v.begin(), a.v.end(), 0.0f);
      CHECK(a.run(k) == std::vector<float>(a.q.size(), 0.0f));
      std::fill(a.q.begin(), a.q.end(), 0.0f);
      std::fill(a.k.begin(), a.k.end(), 0.0f);
      a.v.assign(a.v.size(), 0.5f);
      for (const float x : a.run(k)) CHECK(x == doctest::Approx(0.5f).epsilon(1e-3));
    }
  });
}

TEST_CASE("NaN anywhere in attention reaches the result") {
  for_each_isa([](const Kernels& k) {
    const Attention clean(2, 20, 290, KvFormat::F32, KvFormat::F32);
    const auto all_nan = [&](const Attention& a, std::size_t first, std::size_t step) {
      const std::vector<float> out = a.run(k);
      for (std::size_t i = first; i < out.size(); i += step) REQUIRE(std::isnan(out[i]));
    };
    for (const std::size_t t : {0u, 63u, 64u, 100u, 255u, 256u, 289u}) {
      for (const std::size_t i : {0u, 15u, 16u, 19u}) {
        Attention a = clean;
        a.k[t * 20 + i] = kNaN;
        all_nan(a, 0, 1);
        a.v_format = KvFormat::Int8;
        all_nan(a, 0, 1);
        a = clean;
        a.v[t * 20 + i] = kNaN;
        all_nan(a, i, 20);
        a = clean;
        a.v[t * 20 + i] = kInf;
        const std::vector<float> out = a.run(k);
        CHECK_FALSE(std::isfinite(out[i]));
      }
    }
    for (const KvFormat format : kFormats) {
      for (const float bad : {kNaN, kInf}) {
        for (const std::size_t i : {0u, 19u}) {
          Attention a(2, 20, 290, format, format);
          a.q[i] = bad;
          const std::vector<float> out = a.run(k);
          CHECK(std::isnan(out[0]));
          CHECK(std::isfinite(out[20]));  // the other head of the group
        }
      }
    }
  });
}

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

TEST_CASE("the rotation in vectors is the plain one, and its way back leads back") {
  for_each_isa([](const Kernels& k) {
    for (const std::int32_t d : {16, 20, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256, 320}) {
      CAPTURE(d);
      const kv::Rotation r = kv::make_rotation(d);
      const std::vector<float> tables = cpu::rotation_tables(r), x = random_floats(size(d), 21);
      std::vector<float> plain = x, found = x;
      kv::rotate(r, plain.data());
      k.rotate(r, tables.data(), found.data(), false);
      for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(std::fabs(found[i] - plain[i]) < 1e-6f);
      k.rotate(r, tables.data(), found.data(), true);
      for (std::size_t i = 0; i < x.size(); ++i) REQUIRE(std::fabs(found[i] - x[i]) < 1e-6f);
    }
  });
}

TEST_CASE("tiny INT8 rows are rounded, not cut") {
  for_each_isa([](const Kernels& k) {
    std::vector<float> x = random_floats(64, 31);
    for (const float size_of_row : {1e-2f, 1.1e-5f, 9.7e-6f, 3e-6f, 2e-7f, 1e-9f}) {
      std::vector<float> row = x;
      for (float& v : row) v *= size_of_row;
      std::vector<std::uint8_t> codes(64), scale(2);
      const kv::Rows rows{KvFormat::Int8, codes.data(), scale.data()};
      k.store_row(rows, 0, row.data(), 64);
      std::vector<float> back(64);
      kv::load_row(rows, 0, back.data(), 64);
      std::uint16_t half = 0;
      std::memcpy(&half, scale.data(), 2);
      const float step = f16_to_f32(half);
      CHECK(step <= std::max(size_of_row / 127.0f * 1.01f, 0x1p-24f) + 0x1p-24f);
      for (std::size_t i = 0; i < 64; ++i) REQUIRE(std::fabs(back[i] - row[i]) <= 0.56f * step);
    }
  });
}

TEST_CASE("a large head has no table of its rotation's matrix") {
  for (const std::int32_t d : {6144, 12288, 16384}) {
    CHECK(cpu::rotation_tables(kv::make_rotation(d)).size() == static_cast<std::size_t>(d) + 256);
  }
}

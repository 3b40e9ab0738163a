// Attention of a span, of every instruction set that this machine runs, against plain loops in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/kernels.h"
#include "gguf/blocks.h"
#include "gguf/half.h"
#include "kernel_tests.h"

using namespace ringlm;
using cpu::Kernels;
using cpu::kTile;
using cpu::Partial;

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

namespace {

// Tokens at the last positions of n, each seeing up to `window` positions. A position's row lies in slot
// (position + shift) mod n, so that a span may wrap.
struct Attention {
  std::int32_t group, d, n;
  KvFormat k_format, v_format;
  std::int32_t tokens = 1, window = 1 << 20, shift = 0;
  float softcap = 0.0f;
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
                               scale,   softcap,
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
        if (const double cap = softcap; cap > 0.0) score = cap * std::tanh(score / cap);
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

TEST_CASE("soft caps act behind offsets and before the softmax") {
  for_each_isa([](const Kernels& k) {
    for (const KvFormat format : kFormats) {
      for (const float cap : {1.0f, 5.0f, 50.0f}) {
        Attention a(3, 64, 300, format, format, 4, 100, 33);
        a.softcap = cap;
        check_attention(k, a);
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

// The inner loops of every instruction set that this machine runs, against plain loops in double.
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
#include "tiny_model.h"

using namespace ringlm;
using cpu::Kernels;
using cpu::Partial;
using gguf::DType;

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
    std::vector<float> special = {kNaN, 1e30f, -1e30f, 0.0f, kInf, -kInf};
    k.soft_cap(special.data(), 6, 1.0f, 5.0f);
    CHECK(std::isnan(special[4]));
    CHECK(std::isnan(special[5]));
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

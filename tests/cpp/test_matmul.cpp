// Matrix products of every instruction set that this machine runs, against plain loops in double.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pack.h"
#include "gguf/blocks.h"
#include "gguf/half.h"
#include "kernel_tests.h"
#include "tiny_model.h"

using namespace ringlm;
using cpu::Kernels;
using cpu::MatrixView;
using gguf::DType;

namespace {

constexpr DType kPlain[] = {DType::F32, DType::F16, DType::BF16};
constexpr DType kSmallBlocks[] = {DType::Q4_0, DType::Q4_1, DType::Q5_0,
                                  DType::Q5_1, DType::Q8_0, DType::IQ4_NL};
constexpr DType kLargeBlocks[] = {DType::Q2_K, DType::Q3_K, DType::Q4_K,
                                  DType::Q5_K, DType::Q6_K, DType::IQ4_XS};

struct alignas(64) Line {
  std::byte bytes[64];
};
std::vector<Line> aligned(std::size_t bytes) { return std::vector<Line>((bytes + 63) / 64); }

// Scratch of a product of so many columns.
void* staged(std::int32_t cols) {
  static std::vector<Line> memory;
  memory.resize(cpu::staged_bytes(cols) / sizeof(Line));
  return memory.data();
}

// Rows of random codes whose scales are ordinary numbers.
std::vector<std::uint8_t> random_rows(DType type, std::int32_t rows, std::int32_t cols) {
  const gguf::TypeTraits& t = gguf::traits(type);
  const std::size_t blocks = size(rows) * size(cols) / t.block_size;
  std::vector<std::uint8_t> bytes(blocks * t.block_bytes);
  tiny::Random random(static_cast<std::uint64_t>(type) + 99);
  if (type == DType::F32) {
    const std::vector<float> values = random_floats(blocks, 5);
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>((random() + 1.0f) * 127.9f);
  const auto put = [&](std::size_t at, float value) {
    const std::uint16_t h =
        type == DType::BF16 ? static_cast<std::uint16_t>(to_bits(value) >> 16) : f32_to_f16(value);
    std::memcpy(&bytes[at], &h, sizeof h);
  };
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t at = b * t.block_bytes;
    if (t.block_size == 1) {
      put(at, random());
    } else if (type == DType::Q6_K) {
      put(at + 208, 0.001f * random());
    } else if (type == DType::Q3_K) {
      put(at + 108, 0.001f * random());
    } else if (type == DType::Q2_K) {
      put(at + 80, 0.02f * random());
      put(at + 82, 0.02f * random());
    } else {
      put(at, 0.02f * random());
      if (type == DType::Q4_1 || type == DType::Q5_1 || type == DType::Q4_K || type == DType::Q5_K) {
        put(at + 2, 0.02f * random());
      }
    }
  }
  return bytes;
}

// A matrix in both orders and as float32.
struct Weights {
  std::vector<std::uint8_t> bytes, packed;
  std::vector<float> plain;
  MatrixView rows, groups;

  Weights(DType type, std::int32_t n_rows, std::int32_t cols) : bytes(random_rows(type, n_rows, cols)) {
    view(type, n_rows, cols);
  }
  Weights(std::vector<float> values, std::int32_t n_rows, std::int32_t cols)
      : bytes(values.size() * sizeof(float)) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
    view(DType::F32, n_rows, cols);
  }

 private:
  void view(DType type, std::int32_t n_rows, std::int32_t cols) {
    const gguf::TypeTraits& t = gguf::traits(type);
    rows = {type, n_rows, cols, size(cols) / t.block_size * t.block_bytes, bytes.data()};
    packed.assign(rows.packed_bytes(), 0xaa);
    cpu::pack(rows, bytes.data(), 0, rows.groups(), packed.data());
    groups = rows;
    groups.data = packed.data();
    plain.resize(size(n_rows) * size(cols));
    dequantize(type, std::as_bytes(std::span(bytes)), plain);
  }
};

struct Inputs {
  std::int32_t cols, tokens;
  std::vector<float> x;
  // Quantized together and each alone; empty for columns that are not whole blocks.
  std::vector<Line> together;
  std::vector<std::vector<Line>> alone;

  Inputs(const Kernels& k, std::int32_t cols_, std::int32_t tokens_)
      : Inputs(k, cols_, random_floats(size(tokens_) * size(cols_), 7)) {}
  Inputs(const Kernels& k, std::int32_t cols_, std::vector<float> values)
      : cols(cols_), tokens(static_cast<std::int32_t>(values.size()) / cols_), x(std::move(values)) {
    if (cols % cpu::kActBlock != 0) return;
    together = aligned(cpu::act_bytes(cols, tokens));
    for (std::int32_t m = 0; m < tokens; ++m) {
      const float* row = &x[size(m) * size(cols)];
      k.quantize(row, cols, together.data()->bytes, m, tokens);
      k.quantize(row, cols, alone.emplace_back(aligned(cpu::act_bytes(cols, 1))).data()->bytes, 0, 1);
    }
  }

  // All tokens, or one of them.
  const std::byte* quantized(std::int32_t first, std::int32_t n) const {
    if (together.empty()) return nullptr;
    if (n == 1) return alone[size(first)].data()->bytes;
    REQUIRE(first == 0);
    REQUIRE(n == tokens);
    return together.data()->bytes;
  }
};

cpu::MatmulArgs args(const MatrixView& w, const Inputs& in, std::int32_t first, std::int32_t n,
                     const float* bias, std::vector<float>& y, bool add) {
  return {w,
          bias,
          in.x.data() + size(first) * size(in.cols),
          in.quantized(first, n),
          n,
          y.data() + size(first) * size(w.rows),
          add};
}

// How far a product may be from the exact one: rounding of float32, and half a step of 16 bits for every
// activation of a block.
double allowed(const Weights& w, const Inputs& in, std::int32_t m, std::int32_t r, bool quantized) {
  double sum = 0.0;
  for (std::int32_t first = 0; first < in.cols; first += 32) {
    double largest = 0.0, weights = 0.0, magnitude = 0.0;
    for (std::int32_t c = first; c < std::min(in.cols, first + 32); ++c) {
      const double x = std::fabs(static_cast<double>(in.x[size(m) * size(in.cols) + size(c)]));
      const double v = std::fabs(static_cast<double>(w.plain[size(r) * size(in.cols) + size(c)]));
      largest = std::max(largest, x), weights += v, magnitude += x * v;
    }
    sum += 1e-6 * magnitude;
    // Codes and minima apart are larger than their sum.
    if (quantized) sum += largest / 32639.0 * 0.51 * weights + 4e-6 * largest;
  }
  return sum + 1e-6;
}

void check_matmul(const Kernels& k, DType type, std::int32_t rows, std::int32_t cols, std::int32_t tokens) {
  CAPTURE(static_cast<int>(type));
  CAPTURE(rows);
  CAPTURE(cols);
  CAPTURE(tokens);
  const Weights w(type, rows, cols);
  const Inputs in(k, cols, tokens);
  const std::vector<float> bias = random_floats(size(rows), 8),
                           start = random_floats(size(tokens) * size(rows), 9);
  std::vector<float> scratch(cpu::matmul_scratch(cols));
  const bool quantized = gguf::traits(type).block_size > 1;

  for (const bool packed : {false, true}) {
    CAPTURE(packed);
    // In units of a group of rows, or of a row.
    const std::int32_t units = packed ? w.groups.groups() : rows;
    const auto run = [&](const cpu::MatmulArgs& a, std::int32_t begin, std::int32_t end) {
      packed ? k.matmul(a, begin, end, staged(cols)) : k.row_matmul(a, begin, end, scratch.data());
    };
    const MatrixView& view = packed ? w.groups : w.rows;
    for (const bool add : {false, true}) {
      const float* b = add ? nullptr : bias.data();
      std::vector<float> whole = start;
      run(args(view, in, 0, tokens, b, whole, add), 0, units);
      for (std::int32_t m = 0; m < tokens; ++m) {
        for (std::int32_t r = 0; r < rows; ++r) {
          const std::size_t at = size(m) * size(rows) + size(r);
          double sum = static_cast<double>(add ? start[at] : bias[size(r)]);
          for (std::int32_t c = 0; c < cols; ++c) {
            sum += static_cast<double>(w.plain[size(r) * size(cols) + size(c)]) *
                   in.x[size(m) * size(cols) + size(c)];
          }
          REQUIRE(std::fabs(whole[at] - sum) <= allowed(w, in, m, r, packed && quantized));
        }
      }
      // Bit for bit the same token by token, in any cut of the rows, and with a place of its own for each
      // token.
      std::vector<float> single = start, cut = start, placed = start;
      for (std::int32_t m = 0; m < tokens; ++m) run(args(view, in, m, 1, b, single, add), 0, units);
      CHECK(same_bits(single, whole));
      for (std::int32_t r = 0; r < units;) {
        const std::int32_t end = std::min(units, r + 1 + r % 3);
        run(args(view, in, 0, tokens, b, cut, add), r, end);
        r = end;
      }
      CHECK(same_bits(cut, whole));
      std::vector<float*> places;
      for (std::int32_t m = 0; m < tokens; ++m) places.push_back(&placed[size(m) * size(rows)]);
      cpu::MatmulArgs into = args(view, in, 0, tokens, b, placed, add);
      into.y = nullptr;
      into.into = places.data();
      run(into, 0, units);
      CHECK(same_bits(placed, whole));
    }
  }
}

}  // namespace

TEST_CASE("packing turns bytes round and loses none") {
  const auto check = [](DType type, std::int32_t rows, std::int32_t cols) {
    CAPTURE(static_cast<int>(type));
    const Weights w(type, rows, cols);
    REQUIRE(cpu::can_pack(type));
    CHECK(w.groups.packed_bytes() == size((rows + 15) / 16) * 16 * w.rows.row_bytes);
    std::vector<std::uint8_t> row(w.rows.row_bytes);
    for (std::int32_t r = 0; r < rows; ++r) {
      cpu::unpack_row(w.groups, r, row.data());
      REQUIRE(std::memcmp(row.data(), &w.bytes[size(r) * row.size()], row.size()) == 0);
    }
    // The rows that fill the last group up are zeros.
    if (rows % 16 == 0) return;
    MatrixView all = w.groups;
    all.rows = w.groups.groups() * 16;
    cpu::unpack_row(all, all.rows - 1, row.data());
    CHECK(row == std::vector<std::uint8_t>(row.size(), 0));
  };
  for (const std::int32_t rows : {1, 15, 16, 35}) {
    for (const DType type : kPlain) check(type, rows, 7);
    for (const DType type : kSmallBlocks) check(type, rows, 96);
    for (const DType type : kLargeBlocks) check(type, rows, 512);
  }
  CHECK_FALSE(cpu::can_pack(DType::IQ1_S));
}

TEST_CASE("matrix products of every type, in odd sizes") {
  for_each_isa([](const Kernels& k) {
    for (const DType type : kPlain) {
      for (const std::int32_t cols : {1, 15, 32, 33, 65}) {
        for (const std::int32_t rows : {1, 16, 71}) {
          for (const std::int32_t tokens : {1, 3, 9}) check_matmul(k, type, rows, cols, tokens);
        }
      }
    }
    for (const std::int32_t tokens : {1, 3, 11, 37}) {  // whole tiles of 2, 8 and 16 tokens, and some more
      for (const DType type : kSmallBlocks) {
        for (const std::int32_t cols : {32, 96}) check_matmul(k, type, 35, cols, tokens);
      }
      for (const DType type : kLargeBlocks) check_matmul(k, type, 19, 512, tokens);
    }
  });
}

TEST_CASE("all sets with fused multiply-add give the same bits") {
  std::vector<const Kernels*> sets = cpu::runnable_kernels();
  std::erase_if(sets, [](const Kernels* k) { return std::string_view(k->name) == "generic"; });
  const auto check = [&](DType type, std::int32_t cols) {
    CAPTURE(static_cast<int>(type));
    const Weights w(type, 35, cols);
    std::vector<std::vector<float>> results;
    for (const Kernels* k : sets) {
      const Inputs in(*k, cols, 21);
      std::vector<float>& y = results.emplace_back(size(21 * 35));
      k->matmul(args(w.groups, in, 0, 21, nullptr, y, false), 0, w.groups.groups(), staged(cols));
    }
    for (const std::vector<float>& y : results) CHECK(same_bits(y, results.front()));
  };
  for (const DType type : kPlain) check(type, 33);
  for (const DType type : kSmallBlocks) check(type, 96);
  for (const DType type : kLargeBlocks) check(type, 512);
}

TEST_CASE("activations in 16 bits") {
  for_each_isa([](const Kernels& k) {
    // An identity matrix in Q8_0 shows what became of them.
    std::vector<float> x = random_floats(64, 3, 5.0f);
    x[40] = 1000.0f;  // its own block alone gets coarser
    Weights w(DType::Q8_0, 64, 64);
    std::fill(w.bytes.begin(), w.bytes.end(), std::uint8_t{0});
    for (std::size_t r = 0; r < 64; ++r) {
      std::uint8_t* block = &w.bytes[r * 68 + r / 32 * 34];
      const std::uint16_t one = f32_to_f16(1.0f);
      std::memcpy(block, &one, sizeof one);
      block[2 + r % 32] = 1;
    }
    cpu::pack(w.rows, w.bytes.data(), 0, 4, w.packed.data());
    const auto through = [&](const std::vector<float>& values) {
      const Inputs in(k, 64, values);
      std::vector<float> y(64);
      k.matmul(args(w.groups, in, 0, 1, nullptr, y, false), 0, 4, staged(64));
      return y;
    };
    const std::vector<float> y = through(x);
    for (std::size_t i = 0; i < 64; ++i) {
      CHECK(std::fabs(y[i] - x[i]) <= (i < 32 ? 5.0f : 1000.0f) / 32639.0f * 0.501f);
    }
    CHECK(through(std::vector<float>(64, 0.0f)) == std::vector<float>(64, 0.0f));
    CHECK(through(std::vector<float>(64, 1e-42f)) == std::vector<float>(64, 0.0f));  // no infinite inverse
    CHECK(through(std::vector<float>(64, 3e38f))[5] == doctest::Approx(3e38));
    for (const float bad : {kNaN, kInf, -kInf}) {
      x[40] = bad;
      for (const float v : through(x)) CHECK(!std::isfinite(v));  // zero times that is not a number either
    }
  });
}

TEST_CASE("NaN in a weight or an input reaches the product") {
  for_each_isa([](const Kernels& k) {
    constexpr std::int32_t cols = 37, rows = 5;
    std::vector<float> scratch(cpu::matmul_scratch(cols));
    for (const int at : {0, 20, 36}) {  // in the first vector, in the second one, in the tail
      std::vector<float> values(rows * cols, 1.0f), x(cols, 1.0f), y(rows);
      values[size(2 * cols + at)] = kNaN;
      const Weights w(values, rows, cols);
      const auto check = [&](auto run, const MatrixView& view) {
        const Inputs in(k, cols, x);
        run(args(view, in, 0, 1, nullptr, y, false));
        CHECK(std::isnan(y[2]));
        CHECK(y[3] == 37.0f);
        std::vector<float> infinite = x;
        infinite[size(at)] = kInf;
        const Inputs with_infinity(k, cols, infinite);
        run(args(view, with_infinity, 0, 1, nullptr, y, false));
        CHECK(y[3] == kInf);
      };
      check([&](const cpu::MatmulArgs& a) { k.row_matmul(a, 0, rows, scratch.data()); }, w.rows);
      check([&](const cpu::MatmulArgs& a) { k.matmul(a, 0, 1, staged(cols)); }, w.groups);
    }
    // A scale that is not a number, as damaged files have.
    Weights w(DType::Q4_0, 5, 64);
    const std::uint16_t nan = 0x7e00;
    std::memcpy(&w.bytes[2 * w.rows.row_bytes], &nan, sizeof nan);
    cpu::pack(w.rows, w.bytes.data(), 0, 1, w.packed.data());
    std::vector<float> y(5);
    const Inputs in(k, 64, 1);
    k.matmul(args(w.groups, in, 0, 1, nullptr, y, false), 0, 1, staged(64));
    CHECK(std::isnan(y[2]));
    CHECK(std::isfinite(y[3]));
  });
}

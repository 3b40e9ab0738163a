// The decode layout: what is packed comes back as the file has it, in no more bytes than it may take.
#include "cuda/pack.h"

#include <doctest/doctest.h>

#include <string>

#include "matrices.h"
#include "simt/helpers.h"

using namespace ringlm;
using namespace ringlm::cuda;

namespace {

// A thread a block of a row, which it writes as floats and as halves.
template <gguf::DType kType>
__global__ void blocks_as_numbers(DeviceMatrix w, float* floats, half2* halves) {
  const int blocks = blocks_of(w.cols), i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= w.rows * blocks) return;
  float values[kBlock];
  half2 pairs[kBlock / 2];
  dequantize_block<kType>(w, i / blocks, i % blocks, values);
  dequantize_block<kType>(w, i / blocks, i % blocks, pairs);
  for (int j = 0; j < kBlock; ++j) st_global(floats + i * kBlock + j, values[j]);
  auto* const words = reinterpret_cast<std::uint32_t*>(halves) + i * kBlock / 2;
  for (int j = 0; j < kBlock / 2; ++j) st_global(words + j, bits_as<std::uint32_t>(pairs[j]));
}

void check_round_trip(gguf::DType type, int rows, int cols) {
  CAPTURE(rows);
  CAPTURE(cols);
  std::mt19937 random(static_cast<unsigned>(rows * cols));
  const std::vector<std::uint8_t> file = matrices::random_rows(type, rows, cols, random);
  const std::vector<float> expected = matrices::numbers(type, file);
  const matrices::Packed packed("packed", type, rows, cols, file);

  const int padded = blocks_of(cols) * kBlock, threads = rows * blocks_of(cols);
  simt::Buffer<float> floats("floats", static_cast<std::size_t>(rows * padded));
  simt::Buffer<half2> halves("halves", static_cast<std::size_t>(rows * padded / 2));
  with_packed_type(type, [&](auto t) {
    LAUNCH(blocks_as_numbers<decltype(t)::value>, dim3(static_cast<unsigned>(threads + 63) / 64), dim3(64), 0,
           nullptr, packed.matrix, floats.data(), halves.data());
  });
  int wrong = 0;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < padded; ++c) {
      const float value = c < cols ? expected[static_cast<std::size_t>(r * cols + c)] : 0.0f;
      const auto i = static_cast<std::size_t>(r * padded + c);
      const half rounded = i % 2 == 0 ? halves[i / 2].x : halves[i / 2].y;
      wrong += std::bit_cast<std::uint32_t>(floats[i]) != std::bit_cast<std::uint32_t>(value);
      wrong += __half_as_ushort(rounded) != f32_to_f16(value);
    }
  }
  CHECK(wrong == 0);
  CHECK(simt::report().bypasses == 0);
}

}  // namespace

TEST_CASE("packed blocks are those of the file, bit for bit") {
  for (const gguf::DType type : matrices::kTypes) {
    CAPTURE(std::string(gguf::traits(type).name));
    const int unit = static_cast<int>(gguf::traits(type).block_size);
    simt::in_every_order([&] { check_round_trip(type, 6, unit == 256 ? 256 : 96); });
    check_round_trip(type, 1, unit == 256 ? 512 : 32);
    check_round_trip(type, 4, unit == 256 ? 1280 : 1056);
    if (unit == 1) check_round_trip(type, 5, 77);
  }
}

TEST_CASE("rows can be packed in portions") {
  for (const gguf::DType type : {gguf::DType::Q4_K, gguf::DType::Q5_0, gguf::DType::F32}) {
    std::mt19937 random(3);
    constexpr int kRows = 11, kCols = 1280;
    const std::vector<std::uint8_t> file = matrices::random_rows(type, kRows, kCols, random);
    matrices::Packed whole("whole", type, kRows, kCols, file);
    simt::Buffer<std::uint8_t> data("portions", whole.data.size());
    const std::size_t row = matrices::row_bytes(type, kCols);
    for (std::size_t first = 0; first < kRows; first += 8) {
      const std::size_t n = std::min<std::size_t>(8, kRows - first);
      simt::Buffer<std::uint8_t> portion("portion", n * row);
      std::copy_n(file.data() + first * row, n * row, portion.begin());
      pack(whole.matrix, data.data(), portion.data(), static_cast<std::int64_t>(first),
           static_cast<std::int64_t>(n), nullptr);
    }
    CHECK(std::equal(data.begin(), data.end(), whole.data.begin()));
  }
}

TEST_CASE("rows that the last group lacks are zero") {
  for (const gguf::DType type : matrices::kTypes) {
    CAPTURE(std::string(gguf::traits(type).name));
    std::mt19937 random(4);
    const matrices::Packed packed("packed", type, 5, 256, matrices::random_rows(type, 5, 256, random));
    DeviceMatrix whole = packed.matrix;
    whole.rows = 8;
    simt::Buffer<float> floats("floats", 8 * 256);
    simt::Buffer<half2> halves("halves", 8 * 128);
    with_packed_type(type, [&](auto t) {
      LAUNCH(blocks_as_numbers<decltype(t)::value>, dim3(1), dim3(64), 0, nullptr, whole, floats.data(),
             halves.data());
    });
    CHECK(std::all_of(floats.begin() + 5 * 256, floats.end(), [](float x) { return x == 0.0f; }));
  }
}

TEST_CASE("bytes of matrices") {
  for (const gguf::DType type : matrices::kTypes) {
    CAPTURE(std::string(gguf::traits(type).name));
    CHECK(can_pack(type));
    for (const auto& [rows, cols] : {std::pair{4096, 4096}, {14336, 4096}, {4096, 14336}, {896, 4864}}) {
      const std::size_t bytes = packed_bytes(type, rows, cols);
      CHECK(bytes % 256 == 0);
      const std::size_t in_file = static_cast<std::size_t>(rows) * matrices::row_bytes(type, cols);
      CHECK(static_cast<double>(bytes) <= 1.03 * static_cast<double>(in_file));
    }
  }
  CHECK(!can_pack(gguf::DType::Q2_K));
  CHECK(!can_pack(gguf::DType::IQ4_XS));
}

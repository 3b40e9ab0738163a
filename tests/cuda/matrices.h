// Random matrices of every type as a file has them, packed, and as numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "cuda/launch.h"
#include "gguf/blocks.h"
#include "simt/simt.h"

namespace matrices {

using namespace ringlm;

constexpr gguf::DType kTypes[] = {gguf::DType::Q4_0, gguf::DType::Q4_1, gguf::DType::Q5_0, gguf::DType::Q5_1,
                                  gguf::DType::Q8_0, gguf::DType::Q4_K, gguf::DType::Q5_K, gguf::DType::Q6_K,
                                  gguf::DType::F16,  gguf::DType::BF16, gguf::DType::F32};

inline std::size_t row_bytes(gguf::DType type, int cols) {
  const gguf::TypeTraits& t = gguf::traits(type);
  return static_cast<std::size_t>(cols) / t.block_size * t.block_bytes;
}

// Rows as in a file: any codes and scales, f16 factors of either sign.
inline std::vector<std::uint8_t> random_rows(gguf::DType type, int rows, int cols, std::mt19937& random) {
  using enum gguf::DType;
  const gguf::TypeTraits& t = gguf::traits(type);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(rows) * row_bytes(type, cols));
  std::normal_distribution<float> normal;
  for (std::size_t at = 0; at < bytes.size(); at += t.block_bytes) {
    std::uint8_t* const block = bytes.data() + at;
    const auto put_half = [&](int where, float value) {
      const std::uint16_t half = f32_to_f16(value);
      std::memcpy(block + where, &half, sizeof half);
    };
    if (type == F32 || type == BF16) {
      const std::uint32_t bits = to_bits(normal(random));
      std::memcpy(block, reinterpret_cast<const std::uint8_t*>(&bits) + (type == BF16 ? 2 : 0),
                  t.block_bytes);
      continue;
    }
    if (type == F16) {
      put_half(0, normal(random));
      continue;
    }
    for (std::uint32_t b = 0; b < t.block_bytes; ++b) block[b] = static_cast<std::uint8_t>(random());
    const float d = normal(random) * (type == Q6_K ? 1e-3f : 0.02f);
    put_half(type == Q6_K ? 208 : 0, d);
    if (type == Q4_1 || type == Q5_1) put_half(2, -8.0f * d + 0.05f * normal(random));
    if (type == Q4_K || type == Q5_K) put_half(2, 8.0f * d);
  }
  return bytes;
}

inline std::vector<float> numbers(gguf::DType type, std::span<const std::uint8_t> rows) {
  const gguf::TypeTraits& t = gguf::traits(type);
  std::vector<float> values(rows.size() / t.block_bytes * t.block_size);
  dequantize(type, std::as_bytes(rows), values);
  return values;
}

// A matrix, or experts one behind the other, packed on the device.
struct Packed {
  simt::Buffer<std::uint8_t> data;
  cuda::DeviceMatrix matrix;

  Packed(const char* name, gguf::DType type, int rows, int cols, const std::vector<std::uint8_t>& file,
         int experts = 1)
      : data(name, cuda::packed_bytes(type, rows, cols) * static_cast<std::size_t>(experts)),
        matrix{type, rows, cols, data.data(), experts > 1 ? cuda::packed_bytes(type, rows, cols) : 0} {
    simt::Buffer<std::uint8_t> from("file", file);
    for (int e = 0; e < experts; ++e) {
      cuda::pack(matrix, data.data() + static_cast<std::size_t>(e) * matrix.expert_stride,
                 from.data() + file.size() / static_cast<std::size_t>(experts) * static_cast<std::size_t>(e),
                 0, rows, nullptr);
    }
  }
};

}  // namespace matrices

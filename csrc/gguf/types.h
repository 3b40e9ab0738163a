// The tensor element types that GGUF names, and how many bytes a block of each takes.
// Source: the GGUF specification and the enumeration in the `gguf` package (GGMLQuantizationType).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace ringlm::gguf {

// clang-format off
enum class DType : std::uint32_t {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q8_1 = 9,
  Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, Q8_K = 15,
  IQ2_XXS = 16, IQ2_XS = 17, IQ3_XXS = 18, IQ1_S = 19, IQ4_NL = 20, IQ3_S = 21, IQ2_S = 22, IQ4_XS = 23,
  I8 = 24, I16 = 25, I32 = 26, I64 = 27, F64 = 28, IQ1_M = 29, BF16 = 30, TQ1_0 = 34, TQ2_0 = 35,
  MXFP4 = 39, NVFP4 = 40, Q1_0 = 41,
};
// clang-format on

struct TypeTraits {
  DType type;
  std::string_view name;      // as the field writes it: "Q4_K"
  std::uint32_t block_size;   // elements a block
  std::uint32_t block_bytes;  // bytes a block
};

// nullptr when the number is not one that ringlm knows the size of.
const TypeTraits* find_type(std::uint32_t id) noexcept;

// For a DType that came out of a validated file.
const TypeTraits& traits(DType type) noexcept;

// Every type of the table, by ascending number.
std::span<const TypeTraits> all_types() noexcept;

}  // namespace ringlm::gguf

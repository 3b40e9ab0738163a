#include "gguf/types.h"

#include <array>
#include <cstddef>

namespace ringlm::gguf {
namespace {

// clang-format off
constexpr TypeTraits table[] = {
    {DType::F32,     "F32",       1,   4},
    {DType::F16,     "F16",       1,   2},
    {DType::Q4_0,    "Q4_0",     32,  18},
    {DType::Q4_1,    "Q4_1",     32,  20},
    {DType::Q5_0,    "Q5_0",     32,  22},
    {DType::Q5_1,    "Q5_1",     32,  24},
    {DType::Q8_0,    "Q8_0",     32,  34},
    {DType::Q8_1,    "Q8_1",     32,  40},  // as the gguf package has it; 36 in ggml. No file holds it
    {DType::Q2_K,    "Q2_K",    256,  84},
    {DType::Q3_K,    "Q3_K",    256, 110},
    {DType::Q4_K,    "Q4_K",    256, 144},
    {DType::Q5_K,    "Q5_K",    256, 176},
    {DType::Q6_K,    "Q6_K",    256, 210},
    {DType::Q8_K,    "Q8_K",    256, 292},
    {DType::IQ2_XXS, "IQ2_XXS", 256,  66},
    {DType::IQ2_XS,  "IQ2_XS",  256,  74},
    {DType::IQ3_XXS, "IQ3_XXS", 256,  98},
    {DType::IQ1_S,   "IQ1_S",   256,  50},
    {DType::IQ4_NL,  "IQ4_NL",   32,  18},
    {DType::IQ3_S,   "IQ3_S",   256, 110},
    {DType::IQ2_S,   "IQ2_S",   256,  82},
    {DType::IQ4_XS,  "IQ4_XS",  256, 136},
    {DType::I8,      "I8",        1,   1},
    {DType::I16,     "I16",       1,   2},
    {DType::I32,     "I32",       1,   4},
    {DType::I64,     "I64",       1,   8},
    {DType::F64,     "F64",       1,   8},
    {DType::IQ1_M,   "IQ1_M",   256,  56},
    {DType::BF16,    "BF16",      1,   2},
    {DType::TQ1_0,   "TQ1_0",   256,  54},
    {DType::TQ2_0,   "TQ2_0",   256,  66},
    {DType::MXFP4,   "MXFP4",    32,  17},
    {DType::NVFP4,   "NVFP4",    64,  36},
    {DType::Q1_0,    "Q1_0",    128,  18},
};
// clang-format on

constexpr std::size_t n_ids = static_cast<std::size_t>(table[std::size(table) - 1].type) + 1;

constexpr auto row_of_id = [] {
  std::array<std::int8_t, n_ids> row{};
  row.fill(-1);
  for (std::size_t i = 0; i < std::size(table); ++i) {
    row[static_cast<std::size_t>(table[i].type)] = static_cast<std::int8_t>(i);
  }
  return row;
}();

}  // namespace

const TypeTraits* find_type(std::uint32_t id) noexcept {
  return id < n_ids && row_of_id[id] >= 0 ? &table[row_of_id[id]] : nullptr;
}

const TypeTraits& traits(DType type) noexcept { return *find_type(static_cast<std::uint32_t>(type)); }

std::span<const TypeTraits> all_types() noexcept { return table; }

}  // namespace ringlm::gguf

// Rows of every weight type as float32: the vectors of each instruction set against the plain functions of
// gguf/blocks.h (which tests/python/test_blocks.py compares with the `gguf` package), bit for bit.
#include "gguf/blocks.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/pack.h"
#include "ringlm/error.h"
#include "tiny_model.h"

using namespace ringlm;

namespace {

std::vector<gguf::DType> readable_types() {
  std::vector<gguf::DType> types;
  for (const gguf::TypeTraits& t : gguf::all_types()) {
    if (can_dequantize(t.type)) types.push_back(t.type);
  }
  return types;
}

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::memcmp(&a, &b, sizeof a) == 0; }

void check_row(const cpu::Kernels& k, const gguf::TypeTraits& t, const std::vector<std::uint8_t>& row) {
  std::vector<float> plain(row.size() / t.block_bytes * t.block_size), found(plain.size());
  dequantize(t.type, std::as_bytes(std::span(row)), plain);
  k.dequantize_row(t.type, row.data(), found.data(), static_cast<std::int32_t>(found.size()));
  for (std::size_t i = 0; i < plain.size(); ++i) REQUIRE(same(found[i], plain[i]));
}

}  // namespace

TEST_CASE("weights in vectors are the plain ones, whatever the bytes") {
  for (const cpu::Kernels* k : cpu::runnable_kernels()) {
    CAPTURE(std::string(k->name));
    for (const gguf::DType type : readable_types()) {
      const gguf::TypeTraits& t = gguf::traits(type);
      CAPTURE(std::string(t.name));
      tiny::Random random(static_cast<std::uint64_t>(type));
      for (const std::size_t n : {1u, 2u, 3u, 150u}) {  // whole vectors or not where a block is one weight
        std::vector<std::uint8_t> row(n * t.block_bytes);
        for (std::uint8_t& b : row) b = static_cast<std::uint8_t>((random() + 1.0f) * 127.99f);
        check_row(*k, t, row);
        for (const std::uint8_t b : {0x00, 0x7b, 0x80, 0xff}) {
          row.assign(row.size(), b);
          check_row(*k, t, row);
        }
      }
    }
  }
}

TEST_CASE("types are listed by name, those without arithmetic are refused") {
  std::string names;
  for (const gguf::DType type : readable_types()) {
    names += (names.empty() ? "" : ", ") + std::string(gguf::traits(type).name);
  }
  CHECK(dequantizable_types() == names);
  CHECK(readable_types().size() == 15);
  CHECK_FALSE(can_dequantize(gguf::DType::TQ2_0));
  std::vector<float> y(256);
  CHECK_THROWS_AS(dequantize(gguf::DType::TQ2_0, std::vector<std::byte>(66), y), UnsupportedModelError);
  CHECK_THROWS_AS(dequantize(gguf::DType::IQ4_XS, std::vector<std::byte>(135), y), InvalidArgument);
  for (const gguf::TypeTraits& t : gguf::all_types()) CHECK(cpu::can_pack(t.type) == can_dequantize(t.type));
}

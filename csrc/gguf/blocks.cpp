#include "gguf/blocks.h"

#include "ringlm/error.h"

namespace ringlm {

bool can_dequantize(gguf::DType type) { return blocks::row_function(type) != nullptr; }

std::string dequantizable_types() {
  std::string names;
  for (std::uint32_t id = 0; id < 64; ++id) {
    const gguf::TypeTraits* t = gguf::find_type(id);
    if (!t || !can_dequantize(t->type)) continue;
    if (!names.empty()) names += ", ";
    names += t->name;
  }
  return names;
}

void dequantize(gguf::DType type, std::span<const std::byte> src, std::span<float> dst) {
  const blocks::RowFunction row = blocks::row_function(type);
  const gguf::TypeTraits& t = gguf::traits(type);
  if (!row) {
    throw UnsupportedModelError("type " + std::string(t.name) + " cannot be dequantized; supported are " +
                                dequantizable_types());
  }
  if (dst.size() % t.block_size != 0 || src.size() != dst.size() / t.block_size * t.block_bytes) {
    throw InvalidArgument(std::to_string(src.size()) + " bytes of " + std::string(t.name) + " do not hold " +
                          std::to_string(dst.size()) + " elements");
  }
  row(reinterpret_cast<const std::uint8_t*>(src.data()), dst.data(), dst.size());
}

}  // namespace ringlm

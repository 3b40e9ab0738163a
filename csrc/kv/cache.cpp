#include "kv/cache.h"

#include <cstring>

#include "gguf/half.h"

namespace ringlm::kv {
namespace {

std::string advice(const Layout& l) {
  const std::size_t row = l.nbytes() / static_cast<std::size_t>(l.capacity);
  return "n_ctx up to about " + std::to_string(available_memory() / row) + " would fit";
}

}  // namespace

Cache::Cache(const Layout& layout)
    : layout_(layout), region_(layout.nbytes(), "the K/V cache", advice(layout)) {}

void store_row(KvFormat format, const float* src, std::byte* dst, std::int32_t n) {
  if (format == KvFormat::F32) {
    std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  for (std::int32_t i = 0; i < n; ++i) {
    const std::uint16_t h = f32_to_f16(src[i]);
    std::memcpy(dst + 2 * i, &h, sizeof h);
  }
}

void load_row(KvFormat format, const std::byte* src, float* dst, std::int32_t n) {
  if (format == KvFormat::F32) {
    std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
    return;
  }
  for (std::int32_t i = 0; i < n; ++i) {
    std::uint16_t h;
    std::memcpy(&h, src + 2 * i, sizeof h);
    dst[i] = f16_to_f32(h);
  }
}

}  // namespace ringlm::kv

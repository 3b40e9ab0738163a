#include "kv/cache.h"

#include <cstring>
#include <limits>

#include "gguf/blocks.h"
#include "gguf/half.h"

namespace ringlm::kv {
std::size_t Layout::nbytes() const {
  const auto n = [](std::int64_t count) { return static_cast<std::size_t>(count); };
  const std::size_t row = k_row_bytes() + v_row_bytes();
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max() / 4;
  if (static_cast<double>(n_layer) * n_head_kv * static_cast<double>(capacity) * static_cast<double>(row) >=
      static_cast<double>(most)) {
    return most;
  }
  return n(n_layer) * n(n_head_kv) * n(capacity) * row;
}

Cache::Cache(const Layout& layout) : layout_(layout), region_(layout.nbytes(), "the K/V cache") {}

void store_row(KvFormat format, const float* src, std::byte* dst, std::int32_t n) {
  if (format == KvFormat::F32) {
    std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
  } else {
    f32_to_f16_row(src, reinterpret_cast<std::uint8_t*>(dst), n);
  }
}

void load_row(KvFormat format, const std::byte* src, float* dst, std::int32_t n) {
  const auto* p = reinterpret_cast<const std::uint8_t*>(src);
  const auto count = static_cast<std::size_t>(n);
  format == KvFormat::F32 ? blocks::f32(p, dst, count) : blocks::f16(p, dst, count);
}

}  // namespace ringlm::kv

#include "kv/cache.h"

#include <cstring>
#include <limits>

#include "gguf/blocks.h"
#include "gguf/half.h"
#include "kv/row.h"

namespace ringlm::kv {

std::size_t Layout::nbytes(std::int32_t layer) const {
  return static_cast<std::size_t>(n_head_kv) * static_cast<std::size_t>(ring(layer).capacity) *
         (row_bytes(k_format) + row_bytes(v_format));
}

std::size_t Layout::nbytes() const {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max() / 4;
  const double row = static_cast<double>(row_bytes(k_format) + row_bytes(v_format));
  if (static_cast<double>(n_layer) * n_head_kv * static_cast<double>(n_ctx + chunk) * row >=
      static_cast<double>(most)) {
    return most;
  }
  std::size_t sum = 0;
  for (std::int32_t layer = 0; layer < n_layer; ++layer) sum += nbytes(layer);
  return sum;
}

// Rows of larger elements first and scales last, so that without padding every element is aligned, and every
// row to 16 bytes where a head has a multiple of 16 elements.
Cache::Cache(const Layout& layout, std::span<std::byte> rows, std::span<Layer> layers)
    : layout_(layout), rotation_(make_rotation(layout.head_dim)), bytes_(rows), layers_(layers) {
  auto* next = reinterpret_cast<std::uint8_t*>(rows.data());
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  for (std::int32_t i = 0; i < layout.n_layer; ++i) layers[size(i)] = {layout.ring(i), {}, {}, {}, {}};
  const auto take = [&](const Layer& l, std::uint8_t*& plane, std::size_t row_bytes) {
    plane = next;
    next += size(layout.n_head_kv) * size(l.ring.capacity) * row_bytes;
  };
  for (const std::size_t bytes : {4u, 2u, 1u}) {
    for (Layer& l : layers) {
      if (element_bytes(layout.k_format) == bytes) take(l, l.k, size(layout.head_dim) * bytes);
      if (element_bytes(layout.v_format) == bytes) take(l, l.v, size(layout.head_dim) * bytes);
    }
  }
  for (Layer& l : layers) {
    if (const std::size_t bytes = scale_bytes(layout.k_format); bytes > 0) take(l, l.k_scales, bytes);
    if (const std::size_t bytes = scale_bytes(layout.v_format); bytes > 0) take(l, l.v_scales, bytes);
  }
}

void store_row(const Rows& rows, std::int64_t slot, const float* src, std::int32_t n) {
  std::uint8_t* dst = rows.data + slot * n * static_cast<std::int64_t>(element_bytes(rows.format));
  switch (rows.format) {
    case KvFormat::F32:
      std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
      return;
    case KvFormat::F16:
      return f32_to_f16_row(src, dst, n);
    case KvFormat::Int8:
      return store_int8(src, dst, rows.scales + 2 * slot, n);
  }
}

void load_row(const Rows& rows, std::int64_t slot, float* dst, std::int32_t n) {
  const std::uint8_t* src = rows.data + slot * n * static_cast<std::int64_t>(element_bytes(rows.format));
  const auto count = static_cast<std::size_t>(n);
  switch (rows.format) {
    case KvFormat::F32:
      return blocks::f32(src, dst, count);
    case KvFormat::F16:
      return blocks::f16(src, dst, count);
    case KvFormat::Int8:
      return load_int8(src, rows.scales + 2 * slot, dst, n);
  }
}

}  // namespace ringlm::kv

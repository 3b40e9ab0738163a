// Keys and values of one session: where a row lies and how it is stored. Knows no model.
//
// Per layer and KV head, K and V are [capacity][head_dim] rows, allocated once. The row of position p lies in
// slot p.
//   bytes = n_layer * n_head_kv * capacity * (K row + V row)
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "host/memory.h"
#include "ringlm/kv_format.h"

namespace ringlm::kv {

struct Layout {
  std::int32_t n_layer = 0;
  std::int32_t n_head_kv = 0;
  std::int32_t head_dim = 0;
  std::int64_t capacity = 0;  // rows per layer and KV head
  KvFormat k_format = KvFormat::F16;
  KvFormat v_format = KvFormat::F16;

  std::size_t k_row_bytes() const { return static_cast<std::size_t>(head_dim) * element_bytes(k_format); }
  std::size_t v_row_bytes() const { return static_cast<std::size_t>(head_dim) * element_bytes(v_format); }
  std::size_t nbytes() const;  // of all rows; a quarter of the address space when it is more than that
};

class Cache {
 public:
  // Throws OutOfMemory when the system refuses.
  explicit Cache(const Layout& layout);

  const Layout& layout() const { return layout_; }

  // The rows of one layer and head, slot 0 first; rows are contiguous.
  std::byte* k(std::int32_t layer, std::int32_t head) const {
    return region_.bytes().data() + index(layer, head) * k_plane();
  }
  std::byte* v(std::int32_t layer, std::int32_t head) const {
    const std::size_t all_k =
        static_cast<std::size_t>(layout_.n_layer) * static_cast<std::size_t>(layout_.n_head_kv) * k_plane();
    return region_.bytes().data() + all_k + index(layer, head) * v_plane();
  }

 private:
  std::size_t index(std::int32_t layer, std::int32_t head) const {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(layout_.n_head_kv) +
           static_cast<std::size_t>(head);
  }
  std::size_t k_plane() const { return static_cast<std::size_t>(layout_.capacity) * layout_.k_row_bytes(); }
  std::size_t v_plane() const { return static_cast<std::size_t>(layout_.capacity) * layout_.v_row_bytes(); }

  Layout layout_;
  host::Region region_;
};

// One row, head_dim elements, to and from float32.
void store_row(KvFormat format, const float* src, std::byte* dst, std::int32_t n);
void load_row(KvFormat format, const std::byte* src, float* dst, std::int32_t n);

}  // namespace ringlm::kv

// Keys and values of one session: which rows there are and how one is stored. Knows no model.
//
// Per layer and KV head, K and V are [capacity][head_dim] rows, allocated once (which slot: kv/ring.h). An
// INT8 row has its f16 scale in a plane of its own.
//   bytes = sum over layers of n_head_kv * (K row + V row, scales included) * capacity(layer)
//
// Keys are stored after RoPE, at their true position. INT8 keys are centred and rotated first. Centring:
// where the model adds a bias b to its keys, slowly turning pairs carry a large common offset (Qwen2: norms
// of 600 to 900 against a median of 22). Softmax does not see a vector subtracted from all keys, so
//   c_e = R(middle of epoch e) b_slow
// is subtracted from every key of the epoch, and a score gets q . c_e back. An epoch is `epoch` positions, at
// least n_ctx, so a query meets at most two of them besides the pinned rows, which are of epoch 0. b_slow is
// b on the pairs that turn by less than one radian over an epoch, so what is subtracted is never more than
// half a radian off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kv/ring.h"
#include "kv/rotation.h"
#include "ringlm/kv_format.h"

namespace ringlm::kv {

struct Layout {
  std::int32_t n_layer = 0;
  std::int32_t n_head_kv = 0;
  std::int32_t head_dim = 0;
  KvFormat k_format = KvFormat::F16;
  KvFormat v_format = KvFormat::F16;
  std::int64_t n_ctx = 0;
  std::int64_t pinned = 0;
  std::int64_t chunk = 0;
  std::span<const std::int32_t> windows;  // [n_layer], 0: none

  Ring ring(std::int32_t layer) const {
    return make_ring(windows[static_cast<std::size_t>(layer)], n_ctx, pinned, chunk);
  }
  std::int64_t epoch() const { return (n_ctx + kTile - 1) / kTile * kTile; }

  std::size_t row_bytes(KvFormat format) const {  // with its scale
    return static_cast<std::size_t>(head_dim) * element_bytes(format) + scale_bytes(format);
  }
  std::size_t nbytes(std::int32_t layer) const;
  std::size_t nbytes() const;  // of all layers; a quarter of the address space when it is more than that
};

// K or V of one KV head, slot 0 first.
struct Rows {
  KvFormat format;
  std::uint8_t* data;    // [capacity, head_dim]
  std::uint8_t* scales;  // [capacity] f16; INT8 only
};

class Cache {
 public:
  struct Layer {
    Ring ring;
    std::uint8_t *k, *v;                // [n_head_kv, capacity, head_dim]
    std::uint8_t *k_scales, *v_scales;  // [n_head_kv, capacity] f16; INT8 only
  };

  Cache() = default;
  // rows: Layout::nbytes() bytes, aligned for float. layers [n_layer] is filled in.
  Cache(const Layout& layout, std::span<std::byte> rows, std::span<Layer> layers);

  const Layout& layout() const { return layout_; }
  const Rotation& rotation() const { return rotation_; }
  std::span<std::byte> bytes() const { return bytes_; }
  const Ring& ring(std::int32_t layer) const { return at(layer).ring; }

  Rows k(std::int32_t layer, std::int32_t head) const {
    return rows(layout_.k_format, at(layer).k, at(layer).k_scales, at(layer).ring.capacity, head);
  }
  Rows v(std::int32_t layer, std::int32_t head) const {
    return rows(layout_.v_format, at(layer).v, at(layer).v_scales, at(layer).ring.capacity, head);
  }

 private:
  const Layer& at(std::int32_t layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  Rows rows(KvFormat format, std::uint8_t* data, std::uint8_t* scales, std::int64_t capacity,
            std::int32_t head) const {
    const std::int64_t first = head * capacity;
    const auto bytes = static_cast<std::int64_t>(element_bytes(format)) * layout_.head_dim;
    return {format, data + first * bytes, scales ? scales + 2 * first : nullptr};
  }

  Layout layout_;
  Rotation rotation_;
  std::span<std::byte> bytes_;
  std::span<Layer> layers_;
};

// One row of n elements to and from float32; an INT8 row as it is in memory, centred and rotated.
void store_row(const Rows& rows, std::int64_t slot, const float* src, std::int32_t n);
void load_row(const Rows& rows, std::int64_t slot, float* dst, std::int32_t n);

}  // namespace ringlm::kv

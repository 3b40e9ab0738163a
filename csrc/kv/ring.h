// Which position lies in which slot, and which positions a query sees. Arithmetic alone: no memory.
//
// The first `pinned` positions never leave. All later ones, the moving part, share the other slots in turn:
//   slot(p) = p                                              p < pinned
//             pinned + (p - pinned) mod (capacity - pinned)  otherwise
// A query at p sees position t <= p when t < pinned or p - t < visible - pinned. Softmax does not care about
// order, so nothing is ever shifted or copied. A chunk of M tokens must not overwrite what its own first
// query still sees: capacity = visible + chunk - 1.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ringlm::kv {

// Attention works in tiles of this many consecutive positions, aligned to it.
constexpr std::int32_t kTile = 64;

struct Ring {
  std::int64_t visible;   // most positions that a query sees: n_ctx, or the layer's window
  std::int64_t pinned;    // of these, the first positions of the text; fewer than visible
  std::int64_t capacity;  // slots

  std::int64_t slot(std::int64_t p) const {
    return p < pinned ? p : pinned + (p - pinned) % (capacity - pinned);
  }

  // The first moving position that a query at p sees; above p where p is pinned itself.
  std::int64_t oldest(std::int64_t p) const { return std::max(pinned, p - (visible - pinned) + 1); }

  std::int64_t seen(std::int64_t p) const { return std::min(p + 1, visible); }
};

// The ring of a layer. window 0 means none; one that is not smaller than n_ctx is none either.
inline Ring make_ring(std::int32_t window, std::int64_t n_ctx, std::int64_t pinned, std::int64_t chunk) {
  if (window > 0 && window < n_ctx) return {window, 0, window + chunk - 1};
  return {n_ctx, pinned, n_ctx + chunk - 1};
}

// Consecutive positions [first, first + n), all pinned or none.
struct Tile {
  std::int64_t first;
  std::int32_t n;
  bool pinned;
};

// What a query at p sees, in tiles: the pinned ones, then the moving ones, each in ascending position. The
// cut depends on p alone, so a row is summed in the same order however it came to be computed.
class Tiles {
 public:
  Tiles(const Ring& ring, std::int64_t p)
      : p_(p),
        pinned_end_(std::min(ring.pinned, p + 1)),
        oldest_(ring.oldest(p)),
        n_pinned_((pinned_end_ + kTile - 1) / kTile),
        count_(n_pinned_ + (oldest_ <= p ? p / kTile - oldest_ / kTile + 1 : 0)) {}

  std::int64_t count() const { return count_; }

  Tile operator[](std::int64_t i) const {
    const bool pinned = i < n_pinned_;
    const std::int64_t at = (pinned ? i : oldest_ / kTile + i - n_pinned_) * kTile;
    const std::int64_t begin = pinned ? at : std::max(at, oldest_);
    const std::int64_t end = std::min(at + kTile, pinned ? pinned_end_ : p_ + 1);
    return {begin, static_cast<std::int32_t>(end - begin), pinned};
  }

  // The largest count of any query.
  static std::int64_t most(const Ring& ring) {
    return (ring.pinned + kTile - 1) / kTile + (ring.visible - ring.pinned + kTile - 2) / kTile + 1;
  }

 private:
  std::int64_t p_, pinned_end_, oldest_, n_pinned_, count_;
};

}  // namespace ringlm::kv

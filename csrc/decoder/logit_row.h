// A row of logits in blocks, and the weights that they stand for.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include "decoder/sampler_math.h"
#include "decoder/weigh.h"

namespace ringlm::detail {

constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMaxFloat = std::numeric_limits<float>::max();

inline std::size_t blocks_for(std::size_t n) { return (n + kBlock - 1) / kBlock; }

// Keeps logits above `lowest`, and those equal to it up to position `last`.
struct Cut {
  float lowest = -kMaxFloat;
  std::size_t last = kAll;
};

using Block = std::array<float, kBlock>;

// Logits in blocks, and what truncation has kept of them so far. The last block is padded with minus
// infinity and lies in `tail`; the block in which the cut falls lies in `edge`, without what is cut off.
class Row {
 public:
  Row(std::span<const float> logits, Block& tail, Block& edge)
      : x_(logits.data()), size_(logits.size()), tail_(&tail), edge_(&edge) {
    tail.fill(-kInf);
    const std::size_t whole = size_ / kBlock * kBlock;
    std::copy(x_ + whole, x_ + size_, tail.begin());
  }

  std::size_t size() const { return size_; }
  std::size_t n_blocks() const { return blocks_for(size_); }
  const float* block(std::size_t b) const {
    if (b == edge_block_) return edge_->data();
    return b < size_ / kBlock ? x_ + b * kBlock : tail_->data();
  }

  const Cut& cut() const { return cut_; }
  // The lowest logit kept in a block.
  float lowest(std::size_t b) const { return b > edge_block_ ? above_ : cut_.lowest; }

  void keep(Cut cut) {
    cut_ = cut;
    if (cut.last == kAll) {
      edge_block_ = kAll;
      return;
    }
    // A tie that the previous cut has taken from the same block stays out: it comes after this one too.
    const std::size_t b = cut.last / kBlock;
    if (b != edge_block_) {
      edge_block_ = kAll;
      std::copy_n(block(b), kBlock, edge_->begin());
    }
    for (std::size_t i = cut.last % kBlock + 1; i < kBlock; ++i) {
      if ((*edge_)[i] == cut.lowest) (*edge_)[i] = -kInf;
    }
    edge_block_ = b;
    above_ = std::nextafter(cut.lowest, kInf);
  }

 private:
  const float* x_;
  std::size_t size_;
  Block* tail_;
  Block* edge_;
  Cut cut_;
  float above_ = 0;
  std::size_t edge_block_ = kAll;
};

inline float max_of_block(const float* x) {
  F4 part[4] = {load4(x), load4(x + 4), load4(x + 8), load4(x + 12)};
  for (std::size_t i = 16; i < kBlock; i += 16) {
    for (std::size_t j = 0; j < 4; ++j) part[j] = max4(part[j], load4(x + i + 4 * j));
  }
  const F4 a = max4(max4(part[0], part[1]), max4(part[2], part[3]));
  return std::max(std::max(a[0], a[1]), std::max(a[2], a[3]));
}

inline double sum_of(F4 v) { return (static_cast<double>(v[0]) + v[1]) + (static_cast<double>(v[2]) + v[3]); }

// exp((x - max) / temperature) of a row.
class Weigher {
 public:
  Weigher(float max, float inv_t)
      : max_(max), scale_(std::min(inv_t * kLog2E, kMaxFloat)), least_(max - 126.0f / scale_) {}

  // Below this the weight counts as 0.
  float least() const { return std::max(least_, -kMaxFloat); }

  float operator()(float x) const { return x >= least() ? exp2_in_range((x - max_) * scale_) : 0.0f; }

  // The weights of a block where the logits are at least `lowest`, else 0, into weights [kBlock]; returns
  // their sum. `lowest` must not be below least().
  double block(const float* x, float lowest, float* weights) const {
    return weigh_block(x, max_, scale_, lowest, weights);
  }

 private:
  float max_, scale_, least_;
};

}  // namespace ringlm::detail

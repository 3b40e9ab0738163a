// Where top-k and top-p cut a row of logits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "decoder/logit_row.h"

namespace ringlm::detail {

// Holds the scratch memory of the search, for rows of up to n_vocab logits; nothing is allocated later.
class Truncation {
 public:
  Truncation() = default;
  explicit Truncation(std::size_t n_vocab);

  // Both take the largest logit of each block, block_max [n_blocks], and of the row, and return the cut
  // within what the row has kept so far: after the k-th token; after the token with which the weights
  // reach the fraction p of their sum. A target out of reach cuts nothing more.
  Cut top_k(const Row& row, std::span<const float> block_max, float max, std::size_t k);
  Cut top_p(const Row& row, std::span<const float> block_max, float max, double p);

 private:
  // Logits between which a cut is looked for.
  struct Bracket {
    float lo, hi;
  };
  struct Entry {
    float x;
    std::uint32_t pos;
  };
  static constexpr std::size_t kBins = 2048;

  template <class Measure>
  bool find(const Row& row, std::span<const float> block_max, Bracket in, double target,
            const Measure& measure, Cut& cut);
  template <class Measure>
  bool find_among(std::span<Entry> entries, double& above, double target, const Measure& measure, Cut& cut);
  std::span<const std::uint32_t> sorted_sample(const Row& row, std::span<const float> block_max, float lo);
  static Bracket guess_rank(std::span<const std::uint32_t> sample, Bracket whole, double k, double n);
  static Bracket guess_weight(std::span<const std::uint32_t> sample, Bracket whole, double beyond,
                              const Weigher& weigh);

  std::vector<float> weights_;                         // [n_blocks * kBlock]
  std::vector<Entry> entries_;                         // [n_blocks * kBlock]
  std::vector<float> order_;                           // [n_blocks] block maxima, for selection
  std::vector<std::uint32_t> sample_, sample_sorted_;  // [n_blocks * kBlock / kStride]
  std::array<double, kBins> mass_;
};

}  // namespace ringlm::detail

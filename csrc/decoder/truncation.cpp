// The search sums measures (1 for top-k, the weight for top-p) down the order (logit descending, id
// ascending) until they reach a target. It sorts no more than a few thousand logits: a sorted sample of the
// row brackets the cut, one pass over the row sums exactly what lies above the bracket and collects what
// lies inside, and only that is searched. Equal logits at the ends of the bracket are one group, counted
// and not collected. If the sums show that the sample misled, the bracket becomes the whole row. So the
// sample decides about time alone.
#include "decoder/truncation.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

namespace ringlm::detail {
namespace {

constexpr std::size_t kStride = 32;         // one logit in so many is sampled
constexpr std::size_t kLeastSample = 1024;  // from fewer the cut is not guessed
constexpr double kDeviations = 3;           // standard deviations of the sample that the bracket allows
constexpr std::size_t kSortAtMost = 32;     // fewer tokens than this are sorted

// Each logit counts 1.
struct Count {
  float of(float) const { return 1; }
  F4 at(std::size_t) const { return splat(1); }
  float at_one(std::size_t) const { return 1; }
};

// Each logit counts with its weight; the weights of the row, by position, lie in `weights`.
struct Weight {
  Weigher weigh;
  const float* weights;

  float of(float x) const { return weigh(x); }
  F4 at(std::size_t pos) const { return load4(weights + pos); }
  float at_one(std::size_t pos) const { return weights[pos]; }
};

// The order of floats as that of unsigned integers, and back.
std::uint32_t key_of(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return bits ^ (bits >> 31 != 0 ? 0xffffffffu : 0x80000000u);
}
float float_of(std::uint32_t key) {
  return std::bit_cast<float>(key ^ (key >> 31 != 0 ? 0x80000000u : 0xffffffffu));
}

// Sorts ascending, a digit of 11 bits at a time; the result lies in `to`.
void radix_sort(std::span<std::uint32_t> from, std::span<std::uint32_t> to) {
  constexpr std::uint32_t kDigits = 1 << 11;
  std::array<std::uint32_t, kDigits> starts[3] = {};
  for (const std::uint32_t key : from) {
    for (std::size_t d = 0; d < 3; ++d) ++starts[d][key >> (11 * d) & (kDigits - 1)];
  }
  for (std::size_t d = 0; d < 3; ++d) {
    std::uint32_t n = 0;
    for (std::uint32_t& start : starts[d]) n += std::exchange(start, n);
    for (const std::uint32_t key : from) to[starts[d][key >> (11 * d) & (kDigits - 1)]++] = key;
    if (d < 2) std::swap(from, to);
  }
}

// How many of a block equal x.
std::int64_t count_equal(const float* block, float x) {
  I4 equal = {};
  for (std::size_t i = 0; i < kBlock; i += 4) equal -= load4(block + i) == splat(x);
  return (std::int64_t{equal[0]} + equal[1]) + (std::int64_t{equal[2]} + equal[3]);
}

// How many of the row.
std::int64_t count_equal(const Row& row, std::span<const float> block_max, float x) {
  std::int64_t n = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    if (block_max[b] >= x && row.lowest(b) <= x) n += count_equal(row.block(b), x);
  }
  return n;
}

// Position of the k-th of them, from 1; there are as many.
std::size_t position_of_equal(const Row& row, std::span<const float> block_max, float x, std::int64_t k) {
  for (std::size_t b = 0;; ++b) {
    if (block_max[b] < x || row.lowest(b) > x) continue;
    const float* block = row.block(b);
    if (const std::int64_t n = count_equal(block, x); n < k) {
      k -= n;
      continue;
    }
    std::size_t i = 0;
    while (!(block[i] == x && --k == 0)) ++i;
    return b * kBlock + i;
  }
}

// The measures of the logits above x.
template <class Measure>
double sum_above(const Row& row, std::span<const float> block_max, float x, const Measure& measure) {
  double total = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    if (!(block_max[b] > x)) continue;
    const float* block = row.block(b);
    F4 sum = {};
    for (std::size_t i = 0; i < kBlock; i += 4) {
      sum += keep_if(load4(block + i) > splat(x), measure.at(b * kBlock + i));
    }
    total += sum_of(sum);
  }
  return total;
}

// How many of n equal measures reach the target together with `above`, at least 1; 0 if they do not.
// Otherwise adds them to `above`.
std::int64_t reach(double& above, std::int64_t n, double each, double target) {
  const double all = above + static_cast<double>(n) * each;
  if (n == 0 || all < target) {
    above = all;
    return 0;
  }
  const double k = std::ceil((target - above) / each);
  return k >= 1 ? static_cast<std::int64_t>(std::min(k, static_cast<double>(n))) : 1;
}

}  // namespace

Truncation::Truncation(std::size_t n_vocab) {
  const std::size_t n_blocks = blocks_for(n_vocab);
  weights_.resize(n_blocks * kBlock);
  entries_.resize(n_blocks * kBlock);
  order_.resize(n_blocks);
  sample_.resize(n_blocks * kBlock / kStride);
  sample_sorted_.resize(sample_.size());
}

// Keys of a few kept logits of each block that are at least `lo`, ascending. The places wander from block
// to block, lest a pattern in the row be missed.
std::span<const std::uint32_t> Truncation::sorted_sample(const Row& row, std::span<const float> block_max,
                                                         float lo) {
  constexpr std::size_t kRun = 4, kRuns = kBlock / kStride / kRun, kApart = kBlock / kRuns;
  std::size_t m = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    const float lowest = std::max(row.lowest(b), lo);
    if (block_max[b] < lowest) continue;
    const float* x = row.block(b) + b * kRun % kApart;
    for (std::size_t run = 0; run < kRuns; ++run) {
      for (std::size_t i = 0; i < kRun; ++i) {
        const float v = x[run * kApart + i];
        sample_[m] = key_of(v);
        m += v >= lowest;
      }
    }
  }
  if (m < kLeastSample) return {};
  radix_sort(std::span(sample_).first(m), std::span(sample_sorted_).first(m));
  return std::span(sample_sorted_).first(m);
}

// Within `whole`, a bracket of the k-th of n logits: its rank in the sample, and what that may be off.
Truncation::Bracket Truncation::guess_rank(std::span<const std::uint32_t> sample, Bracket whole, double k,
                                           double n) {
  const auto m = static_cast<double>(sample.size());
  const double rank = k / n * m;
  const double off = kDeviations * std::sqrt(std::min(rank, std::abs(m - rank))) + kDeviations * kDeviations;
  const auto at = [&](double r) { return float_of(sample[sample.size() - static_cast<std::size_t>(r)]); };
  return {rank + off <= m ? at(std::ceil(rank + off)) : whole.lo,
          rank - off >= 1 ? at(rank - off) : whole.hi};
}

// Within `whole`, a bracket of the logit beyond which there is the weight `beyond`. If s is the weight in the
// sample below a logit that weighs w, about kStride * s is below it in the row, with a variance of at most
// kStride * w times that; the term without s, as in Bernstein's inequality, covers heavy logits that the
// sample lacks.
Truncation::Bracket Truncation::guess_weight(std::span<const std::uint32_t> sample, Bracket whole,
                                             double beyond, const Weigher& weigh) {
  Bracket bracket = whole;
  double below = 0;
  for (std::size_t i = 0; i < sample.size(); i += kBlock) {
    const std::size_t n = std::min(kBlock, sample.size() - i);
    float x[kBlock] = {}, weights[kBlock];
    for (std::size_t j = 0; j < n; ++j) x[j] = float_of(sample[i + j]);
    weigh.block(x, weigh.least(), weights);
    for (std::size_t j = 0; j < n; ++j) {
      const double w = static_cast<double>(weights[j]) * kStride;
      const double factor = kDeviations * kDeviations * w;
      const double room = beyond - below - factor;
      if (room >= 0 && room * room >= factor * below) bracket.lo = x[j];
      below += w;
      const double excess = below - beyond;
      if (excess >= 0 && excess * excess >= factor * below) {
        bracket.hi = x[j];
        return bracket;
      }
    }
  }
  return bracket;
}

// The cut among some entries by ascending position: divides them into bins until those in which the target
// is crossed are few or all equal. False, with their measures added to `above`, if they do not reach it.
template <class Measure>
bool Truncation::find_among(std::span<Entry> entries, double& above, double target, const Measure& measure,
                            Cut& cut) {
  const auto less = [](const Entry& a, const Entry& b) { return a.x < b.x; };
  while (!entries.empty()) {
    const auto [low, high] = std::minmax_element(entries.begin(), entries.end(), less);
    const float lo = low->x, hi = high->x;
    if (lo == hi) {
      const auto n = static_cast<std::int64_t>(entries.size());
      const std::int64_t k = reach(above, n, static_cast<double>(measure.at_one(low->pos)), target);
      if (k > 0) cut = {lo, entries[static_cast<std::size_t>(k - 1)].pos};
      return k > 0;
    }
    if (entries.size() <= kSortAtMost) {
      std::sort(entries.begin(), entries.end(),
                [](const Entry& a, const Entry& b) { return a.x > b.x || (a.x == b.x && a.pos < b.pos); });
      for (const Entry& e : entries) {
        above += static_cast<double>(measure.at_one(e.pos));
        if (above < target) continue;
        cut = {e.x, e.pos};
        return true;
      }
      return false;
    }
    const double top = hi, scale = (kBins - 1) / (top - lo);
    const auto bin_of = [&](const Entry& e) { return static_cast<std::size_t>((top - e.x) * scale); };
    mass_.fill(0);
    for (const Entry& e : entries) mass_[bin_of(e)] += static_cast<double>(measure.at_one(e.pos));
    std::size_t bin = 0;
    for (; bin < kBins && above + mass_[bin] < target; ++bin) above += mass_[bin];
    const auto end =
        std::remove_if(entries.begin(), entries.end(), [&](const Entry& e) { return bin_of(e) != bin; });
    entries = entries.first(static_cast<std::size_t>(end - entries.begin()));
  }
  return false;
}

// The cut, if the sums reach the target in the bracket.
template <class Measure>
bool Truncation::find(const Row& row, std::span<const float> block_max, Bracket in, double target,
                      const Measure& measure, Cut& cut) {
  const F4 lo = splat(in.lo), hi = splat(in.hi);
  const auto find_equal = [&](float x, double& above) {
    const std::int64_t n = count_equal(row, block_max, x);
    const std::int64_t k = reach(above, n, static_cast<double>(measure.of(x)), target);
    if (k > 0) cut = {x, position_of_equal(row, block_max, x, k)};
    return k > 0;
  };
  double above = 0;
  if (in.lo == in.hi) {
    above = sum_above(row, block_max, in.hi, measure);
    return above < target && find_equal(in.hi, above);
  }
  std::size_t m = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    if (block_max[b] < std::max(row.lowest(b), in.lo)) continue;
    const float* x = row.block(b);
    F4 sum[2] = {};
    for (std::size_t i = 0; i < kBlock; i += 16) {
      unsigned inside = 0;
      for (std::size_t j = 0; j < 16; j += 4) {
        const F4 v = load4(x + i + j);
        const I4 high = v >= hi;
        sum[j / 4 % 2] += keep_if(high, measure.at(b * kBlock + i + j));
        inside |= bits_of((v > lo) & ~high) << j;
      }
      for (; inside != 0; inside &= inside - 1) {
        const std::size_t j = i + static_cast<std::size_t>(std::countr_zero(inside));
        entries_[m++] = {x[j], static_cast<std::uint32_t>(b * kBlock + j)};
      }
    }
    above += sum_of(sum[0] + sum[1]);
  }
  if (above >= target) {
    above = sum_above(row, block_max, in.hi, measure);
    if (above >= target) return false;
    if (find_equal(in.hi, above)) return true;
  }
  return find_among(std::span(entries_).first(m), above, target, measure, cut) || find_equal(in.lo, above);
}

Cut Truncation::top_k(const Row& row, std::span<const float> block_max, float max, std::size_t k) {
  const std::size_t n_blocks = row.n_blocks();
  const auto target = static_cast<double>(k);
  const Bracket whole{row.cut().lowest, max};
  Bracket bracket = whole;
  if (k <= n_blocks / 8) {
    // k blocks hold a logit of at least the k-th largest block maximum.
    std::copy(block_max.begin(), block_max.end(), order_.begin());
    const auto kth = order_.begin() + static_cast<std::ptrdiff_t>(k - 1);
    const auto end = order_.begin() + static_cast<std::ptrdiff_t>(n_blocks);
    std::nth_element(order_.begin(), kth, end, std::greater<>());
    bracket.lo = std::max(*kth, whole.lo);
  } else {
    double n = 0;
    for (std::size_t b = 0; b < n_blocks; ++b) {
      F4 kept = {};
      for (std::size_t i = 0; i < kBlock; i += 4) {
        kept += keep_if(load4(row.block(b) + i) >= splat(row.lowest(b)), splat(1));
      }
      n += sum_of(kept);
    }
    const auto sample = sorted_sample(row, block_max, whole.lo);
    if (!sample.empty()) bracket = guess_rank(sample, whole, target, n);
  }
  Cut cut = row.cut();
  if (!find(row, block_max, bracket, target, Count{}, cut)) find(row, block_max, whole, target, Count{}, cut);
  return cut;
}

Cut Truncation::top_p(const Row& row, std::span<const float> block_max, float max, double p) {
  const Weight weight{Weigher(max, 1), weights_.data()};
  const Bracket whole{std::max(row.cut().lowest, weight.weigh.least()), max};
  double total = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    const float lowest = std::max(row.lowest(b), whole.lo);
    if (block_max[b] < lowest) continue;
    total += weight.weigh.block(row.block(b), lowest, &weights_[b * kBlock]);
  }
  // At least one token is kept.
  const double target = std::max(p * total, std::numeric_limits<double>::min());
  const auto sample = sorted_sample(row, block_max, whole.lo);
  const Bracket bracket = guess_weight(sample, whole, total - target, weight.weigh);
  Cut cut = row.cut();
  if (!find(row, block_max, bracket, target, weight, cut)) find(row, block_max, whole, target, weight, cut);
  return cut;
}

}  // namespace ringlm::detail

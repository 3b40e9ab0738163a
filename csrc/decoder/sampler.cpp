// One row of logits becomes one token.
//
// Top-k, top-p and min-p each keep a prefix of the tokens ordered by (logit descending, id ascending). So
// truncation never sorts or copies: it finds where the prefix ends (Cut). Logits are handled in blocks whose
// largest value is known. Blocks wholly below the cut are skipped, and the draw needs no pass over the
// logits: it proposes a block by the bound that its largest logit gives, then accepts or rejects one of its
// tokens.
#include "ringlm/sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <sstream>
#include <string>

#include "decoder/sampler_math.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

using namespace detail;

constexpr std::size_t kBlock = 256;
constexpr std::size_t kBins = 2048;      // of the histogram that finds a cut
constexpr std::size_t kSortAtMost = 32;  // fewer tokens than this are sorted
constexpr std::int32_t kMaxWindow = 1 << 20;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMaxFloat = std::numeric_limits<float>::max();
constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

std::size_t blocks_for(std::size_t n) { return (n + kBlock - 1) / kBlock; }

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

float max_of_block(const float* x) {
  F4 a = load4(x), b = load4(x + 4);
  for (std::size_t i = 8; i < kBlock; i += 8) {
    a = max4(a, load4(x + i));
    b = max4(b, load4(x + i + 4));
  }
  a = max4(a, b);
  return std::max(std::max(a[0], a[1]), std::max(a[2], a[3]));
}

std::size_t index_of(float value, const float* x, std::size_t n) {
  return static_cast<std::size_t>(std::find(x, x + n, value) - x);
}

// Fills out [n_blocks] and returns the largest.
float block_maxima(const Row& row, std::span<float> out) {
  float largest = -kInf;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    out[b] = max_of_block(row.block(b));
    largest = std::max(largest, out[b]);
  }
  return largest;
}

double sum_of(F4 v) { return (static_cast<double>(v[0]) + v[1]) + (static_cast<double>(v[2]) + v[3]); }

// exp((x - max) / temperature) of a row.
class Weigher {
 public:
  Weigher(float max, float inv_t)
      : max_(max), scale_(std::min(inv_t * kLog2E, kMaxFloat)), least_(max - 126.0f / scale_) {}

  // Of logits that are at least `least`, else 0.
  F4 operator()(F4 x, F4 least) const {
    return keep_if(x >= least, exp2_nonpositive((x - splat(max_)) * splat(scale_)));
  }
  // Below this the weight counts as 0.
  float least() const { return std::max(least_, -kMaxFloat); }

  float operator()(float x) const { return (*this)(splat(x), splat(least()))[0]; }

 private:
  float max_, scale_, least_;
};

bool any_at_least(const float* x, float lowest) {  // x [16]
  const F4 low = splat(lowest);
  return any(((load4(x) >= low) | (load4(x + 4) >= low)) | ((load4(x + 8) >= low) | (load4(x + 12) >= low)));
}

bool any_between(const float* x, float least, float most) {  // x [16]
  I4 found = {};
  for (std::size_t i = 0; i < 16; i += 4) {
    const F4 v = load4(x + i);
    found |= (v >= splat(least)) & (v <= splat(most));
  }
  return any(found);
}

// Position of the first value that is NaN or infinite, or the size.
std::size_t first_not_finite(std::span<const float> x) {
  const U4 exponent = {0x7f800000, 0x7f800000, 0x7f800000, 0x7f800000};
  std::size_t i = 0;
  for (; i + kBlock <= x.size(); i += kBlock) {
    I4 bad = {};
    for (std::size_t j = 0; j < kBlock; j += 4) bad |= ((U4)load4(&x[i + j]) & exponent) == exponent;
    if (bad[0] | bad[1] | bad[2] | bad[3]) break;
  }
  while (i < x.size() && std::isfinite(x[i])) ++i;
  return i;
}

// Divides the logits from `lo` to `hi` evenly: bin 0 holds hi, the last one (kBins) all that is below lo.
// Falls as x rises, so a bin is a stretch of the order in which truncation keeps tokens.
struct Binning {
  float hi, scale;

  Binning(float lo, float hi_) : hi(hi_) {
    const double range = static_cast<double>(hi) - static_cast<double>(lo);
    const bool divisible = range > 1e-30 && range < 1e30;  // otherwise bin 0 holds all
    scale = divisible ? static_cast<float>((kBins - 1) / range) : 0;
  }
  I4 operator()(F4 x) const {
    const F4 t = (splat(hi) - x) * splat(scale);
    return __builtin_convertvector(min4(t, splat(kBins)), I4);
  }
  std::int32_t operator()(float x) const { return (*this)(splat(x))[0]; }

  // An interval that holds the bin, with a bin to spare on both sides.
  std::pair<float, float> around(std::int32_t bin) const {
    if (scale == 0) return {-kMaxFloat, hi};
    const float width = 1 / scale, f = static_cast<float>(bin);
    return {bin < static_cast<std::int32_t>(kBins) ? hi - (f + 2) * width : -kMaxFloat, hi - (f - 1) * width};
  }
};

struct Entry {
  float x;
  std::uint32_t pos;
  float weight;
};

// Scratch of find_cut: entries [n_vocab].
struct CutScratch {
  std::vector<Entry> entries;
  std::array<double, kBins + 1> mass;
};

// The first bin in which `above` plus the masses reaches the target, or the number of bins. Adds the bins
// before it to `above`.
std::size_t crossing(std::span<const double> mass, double target, double& above) {
  std::size_t bin = 0;
  for (; bin < mass.size() && above + mass[bin] < target; ++bin) above += mass[bin];
  return bin;
}

// The cut among some entries, not none, by ascending position: divides them into bins until those in
// which the target is crossed are few or all equal. Keeps all of them if rounding hides the crossing.
Cut find_cut_among(std::span<Entry> entries, std::span<double> mass, double above, double target) {
  const auto less = [](const Entry& a, const Entry& b) { return a.x < b.x; };
  while (true) {
    const auto [low, high] = std::minmax_element(entries.begin(), entries.end(), less);
    const Cut all{low->x, kAll};
    const double lo = low->x, hi = high->x;
    if (lo < hi && entries.size() > kSortAtMost) {
      const double scale = (static_cast<double>(mass.size()) - 1) / (hi - lo);
      const auto bin_of = [&](const Entry& e) { return static_cast<std::size_t>((hi - e.x) * scale); };
      std::fill(mass.begin(), mass.end(), 0);
      for (const Entry& e : entries) mass[bin_of(e)] += e.weight;
      const std::size_t bin = crossing(mass, target, above);
      if (bin == mass.size()) return all;
      const auto end =
          std::remove_if(entries.begin(), entries.end(), [&](const Entry& e) { return bin_of(e) != bin; });
      entries = entries.first(static_cast<std::size_t>(end - entries.begin()));
      continue;
    }
    if (lo < hi) {
      std::sort(entries.begin(), entries.end(),
                [](const Entry& a, const Entry& b) { return a.x > b.x || (a.x == b.x && a.pos < b.pos); });
    }
    for (const Entry& e : entries) {
      above += e.weight;
      if (above >= target) return {e.x, e.pos};
    }
    return all;
  }
}

// Where a prefix of the row ends: at the k-th token (Weighted false, target k), or where the weights first
// reach a fraction of their sum (Weighted true, target the fraction). `hi` is the largest logit. The cut is
// expected at `lo` or above; without weights it must not be below. A histogram finds the bin in which the
// target is crossed; only its tokens are looked at one by one. A target out of reach cuts nothing more.
template <bool Weighted>
Cut find_cut(const Row& row, std::span<const float> block_max, float lo, float hi, double target,
             CutScratch& scratch) {
  if (!Weighted && lo == hi) {
    for (std::size_t pos = 0; pos < row.size(); ++pos) {
      if (row.block(pos / kBlock)[pos % kBlock] == hi && --target <= 0) return {hi, pos};
    }
  }
  const Weigher weigh(hi, 1);
  const Binning bin_of(lo, hi);
  auto& mass = scratch.mass;
  mass.fill(0);
  std::int32_t bins[16];
  float weights[16];
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    const float lowest = Weighted ? std::max(row.lowest(b), weigh.least()) : lo;
    if (block_max[b] < lowest) continue;
    F4 below = {};
    for (std::size_t i = 0; i < kBlock; i += 16) {
      const float* x = row.block(b) + i;
      if (!any_at_least(x, lowest)) continue;
      if constexpr (Weighted) {
        for (std::size_t j = 0; j < 16; j += 4) store4(weights + j, weigh(load4(x + j), splat(lowest)));
        if (!any_at_least(x, lo)) {
          for (std::size_t j = 0; j < 16; j += 4) below += load4(weights + j);
          continue;
        }
      }
      for (std::size_t j = 0; j < 16; j += 4) store4(bins + j, bin_of(load4(x + j)));
      for (std::size_t j = 0; j < 16; ++j) {
        mass[static_cast<std::size_t>(bins[j])] += Weighted ? static_cast<double>(weights[j]) : 1.0;
      }
    }
    mass[kBins] += sum_of(below);
  }
  if constexpr (Weighted) target *= std::accumulate(mass.begin(), mass.end(), 0.0);
  double above = 0;
  const std::size_t bin = crossing(mass, target, above);
  if (bin > kBins) return row.cut();

  std::size_t m = 0;
  const auto wanted = static_cast<std::int32_t>(bin);
  const auto [least, most] = bin_of.around(wanted);
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    const float lowest = row.lowest(b);
    if (block_max[b] < lowest || bin_of(block_max[b]) > wanted) continue;
    for (std::size_t i = 0; i < kBlock; i += 16) {
      const float* x = row.block(b) + i;
      if (!any_between(x, least, most)) continue;
      for (std::size_t j = 0; j < 16; j += 4) {
        const F4 v = load4(x + j);
        store4(bins + j, (bin_of(v) == I4{wanted, wanted, wanted, wanted}) & (v >= splat(lowest)));
        if constexpr (Weighted) store4(weights + j, weigh(v, splat(weigh.least())));
      }
      for (std::size_t j = 0; j < 16; ++j) {
        const auto pos = static_cast<std::uint32_t>(b * kBlock + i + j);
        scratch.entries[m] = {x[j], pos, Weighted ? weights[j] : 1.0f};
        m += bins[j] != 0;
      }
    }
  }
  if (m == 0) return row.cut();
  const Cut cut = find_cut_among(std::span(scratch.entries).first(m), mass, above, target);
  return cut.lowest == row.cut().lowest && cut.last > row.cut().last ? row.cut() : cut;
}

// The smallest float that is not below v, within the finite floats.
float float_not_below(double v) {
  const float f = static_cast<float>(std::clamp<double>(v, -kMaxFloat, kMaxFloat));
  return static_cast<double>(f) < v ? std::nextafter(f, kInf) : f;
}

template <class T>
[[noreturn]] void out_of_range(const char* name, T value, const char* range) {
  std::ostringstream s;
  s.precision(17);
  s << name << " is " << value << "; expected " << range;
  throw InvalidArgument(s.str());
}

void check(const SamplerParams& p, std::int32_t n_vocab) {
  if (n_vocab < 1) out_of_range("n_vocab", n_vocab, "at least 1");
  if (!(std::isfinite(p.temperature) && p.temperature >= 0)) {
    out_of_range("temperature", p.temperature, "a finite number >= 0 (0 takes the most probable token)");
  }
  if (p.top_k < 0) out_of_range("top_k", p.top_k, "at least 0 (0 is off)");
  if (!(p.top_p >= 0 && p.top_p <= 1)) out_of_range("top_p", p.top_p, "0 to 1 (1 is off)");
  if (!(p.min_p >= 0 && p.min_p <= 1)) out_of_range("min_p", p.min_p, "0 to 1 (0 is off)");
  if (!(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0)) {
    out_of_range("repetition_penalty", p.repetition_penalty, "a finite number > 0 (1 is off)");
  }
  if (!std::isfinite(p.presence_penalty)) {
    out_of_range("presence_penalty", p.presence_penalty, "a finite number (0 is off)");
  }
  if (!std::isfinite(p.frequency_penalty)) {
    out_of_range("frequency_penalty", p.frequency_penalty, "a finite number (0 is off)");
  }
  if (p.penalty_window < 0 || p.penalty_window > kMaxWindow) {
    out_of_range("penalty_window", p.penalty_window, "0 (off) to 1048576 tokens");
  }
  std::vector<bool> banned;
  std::int32_t n_banned = 0;
  for (const auto& [id, bias] : p.logit_bias) {
    const std::string name = "logit_bias[" + std::to_string(id) + "]";
    if (id < 0 || id >= n_vocab) {
      throw InvalidArgument(name + ": there is no such token; expected an id from 0 to " +
                            std::to_string(n_vocab - 1));
    }
    if (std::isnan(bias) || bias == kInf) {
      out_of_range(name.c_str(), bias, "a finite number, or minus infinity to ban the token");
    }
    if (std::isfinite(bias)) continue;
    banned.resize(static_cast<std::size_t>(n_vocab));
    if (!banned[static_cast<std::size_t>(id)]) ++n_banned;
    banned[static_cast<std::size_t>(id)] = true;
  }
  if (n_banned == n_vocab) {
    throw InvalidArgument("logit_bias bans all " + std::to_string(n_vocab) +
                          " tokens; leave at least one without minus infinity");
  }
}

[[noreturn]] void not_finite(float value, std::size_t index, const char* expected) {
  std::ostringstream s;
  s << "logit " << index << " is " << value << "; expected " << expected;
  throw NumericError(s.str());
}

// The largest logit, for the functions that accept minus infinity.
float checked_max(std::span<const float> logits) {
  if (logits.empty()) throw InvalidArgument("logits are empty; expected one per token of the vocabulary");
  for (std::size_t i = first_not_finite(logits); i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == kInf) {
      not_finite(logits[i], i, "a finite number or minus infinity");
    }
  }
  Block tail, edge;
  const Row row(logits, tail, edge);
  float largest = -kInf;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) largest = std::max(largest, max_of_block(row.block(b)));
  if (largest == -kInf) throw NumericError("every logit is minus infinity; expected at least one finite");
  return largest;
}

// ln of the sum of exp(logits - max). Sums of sixteen terms are floats, the rest is double.
double log_of_sum(std::span<const float> logits, float max) {
  Block tail, edge;
  const Row row(logits, tail, edge);
  const Weigher weigh(max, 1);
  double sum = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    const float* x = row.block(b);
    F4 part[4] = {};
    for (std::size_t i = 0; i < kBlock; i += 4) part[i / 4 % 4] += weigh(load4(x + i), splat(weigh.least()));
    for (const F4& p : part) sum += sum_of(p);
  }
  return std::log(sum);
}

}  // namespace

struct Sampler::Impl {
  SamplerParams params;
  std::size_t n_vocab;
  bool penalize;    // a penalty is on and its window is not 0
  float inv_t = 0;  // 1 / temperature
  double log_min_p = 0;
  Rng rng;

  std::vector<std::int32_t> window;  // ring of the latest tokens
  std::size_t window_used = 0;
  std::size_t window_next = 0;
  std::vector<std::int32_t> counts;  // [n_vocab] occurrences in the window

  Block tail, edge;                // of the row
  std::vector<float> adjusted;     // [n_vocab] logits with bias and penalties
  std::vector<float> block_max;    // [n_blocks]
  std::vector<float> block_order;  // [n_blocks] the same, for selection
  std::vector<double> block_cum;   // [n_blocks] running sum of the bounds that the draw uses
  CutScratch cut_scratch;

  Impl(std::int32_t n, SamplerParams p) : params(std::move(p)), rng(params.seed) {
    check(params, n);
    n_vocab = static_cast<std::size_t>(n);
    const bool penalties =
        params.repetition_penalty != 1 || params.presence_penalty != 0 || params.frequency_penalty != 0;
    penalize = penalties && params.penalty_window > 0;
    if (params.temperature > 0) {
      inv_t = static_cast<float>(std::min(1 / params.temperature, static_cast<double>(kMaxFloat)));
    }
    if (params.min_p > 0) log_min_p = log_positive(params.min_p);

    const std::size_t n_blocks = blocks_for(n_vocab);
    block_max.resize(n_blocks);
    block_order.resize(n_blocks);
    block_cum.resize(n_blocks);
    if (penalize) {
      window.resize(static_cast<std::size_t>(params.penalty_window));
      counts.resize(n_vocab);
    }
    if (penalize || !params.logit_bias.empty()) adjusted.resize(n_vocab);
    if (params.temperature > 0 && (top_k_on() || params.top_p < 1)) {
      cut_scratch.entries.resize(n_blocks * kBlock);
    }
  }

  bool top_k_on() const { return params.top_k > 0 && static_cast<std::size_t>(params.top_k) < n_vocab; }

  void push(std::int32_t token) noexcept {
    if (!penalize) return;
    if (window_used == window.size()) {
      --counts[static_cast<std::size_t>(window[window_next])];
    } else {
      ++window_used;
    }
    window[window_next] = token;
    window_next = window_next + 1 == window.size() ? 0 : window_next + 1;
    ++counts[static_cast<std::size_t>(token)];
  }

  // The logits with bias and penalties.
  std::span<const float> adjust(std::span<const float> logits) {
    if (params.logit_bias.empty() && window_used == 0) return logits;
    std::copy(logits.begin(), logits.end(), adjusted.begin());
    const auto saturate = [](double v) { return std::clamp<double>(v, -kMaxFloat, kMaxFloat); };
    for (const auto& [id, bias] : params.logit_bias) {
      float& x = adjusted[static_cast<std::size_t>(id)];
      x = bias == -kInf || x == -kInf ? -kInf : static_cast<float>(saturate(x + bias));
    }
    // Each distinct token once: its count is negated while the loop has still to meet it again.
    for (std::size_t i = 0; i < window_used; ++i) {
      const auto id = static_cast<std::size_t>(window[i]);
      const std::int32_t count = counts[id];
      if (count < 0) continue;
      counts[id] = -count;
      float& x = adjusted[id];
      if (x == -kInf) continue;
      double v = x;
      v = saturate(v > 0 ? v / params.repetition_penalty : v * params.repetition_penalty);
      v = saturate(v - params.presence_penalty);
      x = static_cast<float>(saturate(v - count * params.frequency_penalty));
    }
    for (std::size_t i = 0; i < window_used; ++i) {
      std::int32_t& count = counts[static_cast<std::size_t>(window[i])];
      count = std::abs(count);
    }
    return adjusted;
  }

  // Where top-k cuts the row.
  Cut top_k_cut(const Row& row, float max) {
    const auto k = static_cast<std::size_t>(params.top_k);
    const std::size_t n_blocks = row.n_blocks();
    float lo = -kMaxFloat;
    if (k <= n_blocks) {
      // k blocks hold a logit of at least the k-th largest block maximum.
      std::copy(block_max.begin(), block_max.end(), block_order.begin());
      const auto kth = block_order.begin() + static_cast<std::ptrdiff_t>(k - 1);
      std::nth_element(block_order.begin(), kth, block_order.end(), std::greater<>());
      lo = std::max(*kth, lo);
    } else {
      F4 least = splat(kMaxFloat);  // of the finite ones
      for (std::size_t b = 0; b < n_blocks; ++b) {
        for (std::size_t i = 0; i < kBlock; i += 4) {
          const F4 x = load4(row.block(b) + i);
          least = min4(least, x >= splat(-kMaxFloat) ? x : least);
        }
      }
      lo = std::min(std::min(least[0], least[1]), std::min(least[2], least[3]));
    }
    return find_cut<false>(row, block_max, lo, max, static_cast<double>(k), cut_scratch);
  }

  // Where top-p cuts the row. Tokens that each have less than (1 - p) / size of the largest weight do not
  // have 1 - p of the sum together, so the cut lies above them.
  Cut top_p_cut(const Row& row, float max) {
    const double floor = log_positive((1 - params.top_p) / static_cast<double>(row.size())) - 1e-3;
    const float lo = std::max(std::nextafter(float_not_below(max + floor), -kInf), -kMaxFloat);
    return find_cut<true>(row, block_max, lo, max, params.top_p, cut_scratch);
  }

  // Draws among the tokens that are kept, by rejection (von Neumann 1951). A block is proposed in proportion
  // to its largest weight, and one of its kBlock places evenly; that is accepted with its weight over the
  // largest one, and never if it is not kept. So a token is returned in proportion to its weight. A block
  // that is proposed holds a token of its largest weight, so fewer than kBlock proposals are expected.
  std::int32_t draw(const Row& row, float max) {
    const Weigher weigh(max, inv_t);
    double total = 0;
    for (std::size_t b = 0; b < row.n_blocks(); ++b) {
      if (block_max[b] >= row.lowest(b)) total += static_cast<double>(weigh(block_max[b]));
      block_cum[b] = total;
    }
    while (true) {
      const auto found = std::upper_bound(block_cum.begin(), block_cum.end(), rng.uniform() * total);
      if (found == block_cum.end()) continue;  // the product was rounded up to the total
      const auto b = static_cast<std::size_t>(found - block_cum.begin());
      static_assert(kBlock == 256);
      const std::uint64_t bits = rng.next();
      const std::size_t i = bits >> 56;
      const double u = static_cast<double>(bits & ((std::uint64_t{1} << 53) - 1)) * 0x1p-53;
      const float x = row.block(b)[i];
      if (x < row.lowest(b)) continue;
      if (u * static_cast<double>(weigh(block_max[b])) < static_cast<double>(weigh(x))) {
        return static_cast<std::int32_t>(b * kBlock + i);
      }
    }
  }

  std::int32_t sample(std::span<const float> logits) {
    if (logits.size() != n_vocab) {
      throw InvalidArgument("there are " + std::to_string(logits.size()) + " logits; expected " +
                            std::to_string(n_vocab) + ", one per token of the vocabulary");
    }
    const std::size_t bad = first_not_finite(logits);
    if (bad < n_vocab) not_finite(logits[bad], bad, "a finite number; the model's output is unusable");

    Row row(adjust(logits), tail, edge);
    const float max = block_maxima(row, block_max);
    std::int32_t token = 0;
    if (params.temperature == 0) {
      const std::size_t b = index_of(max, block_max.data(), block_max.size());
      token = static_cast<std::int32_t>(b * kBlock + index_of(max, row.block(b), kBlock));
    } else {
      if (top_k_on()) row.keep(top_k_cut(row, max));
      if (params.top_p < 1) row.keep(top_p_cut(row, max));
      if (params.min_p > 0) {
        const float lowest = float_not_below(max + log_min_p);
        if (lowest > row.cut().lowest) row.keep({lowest, kAll});
      }
      token = draw(row, max);
    }
    push(token);
    return token;
  }
};

Sampler::Sampler(std::int32_t n_vocab, SamplerParams params)
    : impl_(std::make_unique<Impl>(n_vocab, std::move(params))) {}
Sampler::~Sampler() = default;
Sampler::Sampler(const Sampler& other) : impl_(std::make_unique<Impl>(*other.impl_)) {}
Sampler& Sampler::operator=(const Sampler& other) {
  *impl_ = *other.impl_;
  return *this;
}
Sampler::Sampler(Sampler&&) noexcept = default;
Sampler& Sampler::operator=(Sampler&&) noexcept = default;

std::int32_t Sampler::sample(std::span<const float> logits) { return impl_->sample(logits); }

void Sampler::accept(std::span<const std::int32_t> tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || static_cast<std::size_t>(tokens[i]) >= impl_->n_vocab) {
      throw InvalidArgument("token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                            "; expected an id from 0 to " + std::to_string(impl_->n_vocab - 1));
    }
  }
  for (const std::int32_t token : tokens) impl_->push(token);
}

void Sampler::reset() noexcept {
  impl_->rng = Rng(impl_->params.seed);
  impl_->window_used = impl_->window_next = 0;
  std::fill(impl_->counts.begin(), impl_->counts.end(), 0);
}

std::int32_t Sampler::n_vocab() const noexcept { return static_cast<std::int32_t>(impl_->n_vocab); }
const SamplerParams& Sampler::params() const noexcept { return impl_->params; }

std::int32_t argmax(std::span<const float> logits) {
  const float max = checked_max(logits);
  return static_cast<std::int32_t>(index_of(max, logits.data(), logits.size()));
}

float log_probability(std::span<const float> logits, std::int32_t id) {
  const float max = checked_max(logits);
  if (id < 0 || static_cast<std::size_t>(id) >= logits.size()) {
    throw InvalidArgument("token id is " + std::to_string(id) + "; expected 0 to " +
                          std::to_string(logits.size() - 1));
  }
  const double x = logits[static_cast<std::size_t>(id)];
  return static_cast<float>(x - max - log_of_sum(logits, max));
}

std::vector<LogProb> top_log_probabilities(std::span<const float> logits, std::int32_t k) {
  const float max = checked_max(logits);
  if (k < 0) out_of_range("k", k, "at least 0");
  const std::size_t n = std::min(static_cast<std::size_t>(k), logits.size());
  const double lse = log_of_sum(logits, max);
  std::vector<LogProb> best;
  best.reserve(n);
  // A heap of the best so far, the worst of them on top; most tokens fail its comparison.
  const auto better = [](const LogProb& a, const LogProb& b) {
    return a.logprob > b.logprob || (a.logprob == b.logprob && a.id < b.id);
  };
  for (std::size_t i = 0; n > 0 && i < logits.size(); ++i) {
    if (best.size() == n) {
      if (!(logits[i] > best.front().logprob)) continue;
      std::pop_heap(best.begin(), best.end(), better);
      best.pop_back();
    }
    best.push_back({static_cast<std::int32_t>(i), logits[i]});
    std::push_heap(best.begin(), best.end(), better);
  }
  std::sort_heap(best.begin(), best.end(), better);
  for (LogProb& p : best) p.logprob = static_cast<float>(static_cast<double>(p.logprob) - max - lse);
  return best;
}

}  // namespace ringlm

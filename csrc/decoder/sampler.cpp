// One row of logits becomes one token.
//
// Top-k, top-p and min-p each keep a prefix of the tokens ordered by (logit descending, id ascending). So
// truncation never sorts: it finds where the prefix ends (Cut), and the draw walks over the tokens in id
// order. Work is done in blocks; a block whose largest logit lies below the cut is skipped.
#include "ringlm/sampler.h"

#include <algorithm>
#include <cmath>
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

// Logits in whole blocks; the last one is padded with minus infinity and may lie elsewhere.
struct Row {
  const float* x;
  const float* tail;
  std::size_t size;
  const std::int32_t* ids = nullptr;  // null: the position is the id

  std::size_t n_blocks() const { return blocks_for(size); }
  const float* block(std::size_t b) const { return b < size / kBlock ? x + b * kBlock : tail; }
  std::int32_t id(std::size_t pos) const { return ids ? ids[pos] : static_cast<std::int32_t>(pos); }
};

// Keeps logits above `lowest`, and those equal to it up to position `last`.
struct Cut {
  float lowest = -kMaxFloat;
  std::size_t last = kAll;
};

Row row_of(std::span<const float> logits, std::span<float, kBlock> tail) {
  const std::size_t whole = logits.size() / kBlock * kBlock;
  std::fill(tail.begin(), tail.end(), -kInf);
  std::copy(logits.begin() + static_cast<std::ptrdiff_t>(whole), logits.end(), tail.begin());
  return {logits.data(), tail.data(), logits.size()};
}

float max_of_block(const float* x) {
  F4 a = load4(x), b = load4(x + 4);
  for (std::size_t i = 8; i < kBlock; i += 8) {
    a = max4(a, load4(x + i));
    b = max4(b, load4(x + i + 4));
  }
  a = max4(a, b);
  return std::max(std::max(a[0], a[1]), std::max(a[2], a[3]));
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

  // Sum over a block, of logits that are at least `lowest`. Stores the weights in `out` unless it is null.
  template <bool Store>
  double block(const float* x, float lowest, float* out) const {
    const F4 bound = splat(std::max(lowest, least()));
    F4 sum[4] = {};
    for (std::size_t i = 0; i < kBlock; i += 16) {
      for (std::size_t j = 0; j < 4; ++j) {
        const F4 w = (*this)(load4(x + i + 4 * j), bound);
        if constexpr (Store) store4(out + i + 4 * j, w);
        sum[j] += w;
      }
    }
    return (sum_of(sum[0]) + sum_of(sum[1])) + (sum_of(sum[2]) + sum_of(sum[3]));
  }

 private:
  float max_, scale_, least_;
};

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

// The first bin in which `above` plus the masses reaches the target; kBins + 1 if none. Adds the bins before
// it to `above`.
std::size_t crossing(std::span<const double> mass, double target, double& above) {
  std::size_t bin = 0;
  for (; bin < mass.size() && above + mass[bin] < target; ++bin) above += mass[bin];
  return bin;
}

// The same among a few entries: sorts them, or divides them further until they are few or all equal.
Cut find_cut_among(std::span<Entry> entries, std::span<double> mass, double above, double target) {
  const auto ascending = [](const Entry& a, const Entry& b) { return a.x < b.x; };
  while (!entries.empty()) {
    const auto [low, high] = std::minmax_element(entries.begin(), entries.end(), ascending);
    const double lo = low->x, hi = high->x;
    if (entries.size() <= kSortAtMost || lo == hi) break;
    const double scale = (static_cast<double>(mass.size()) - 1) / (hi - lo);
    const auto bin_of = [&](const Entry& e) { return static_cast<std::size_t>((hi - e.x) * scale); };
    std::fill(mass.begin(), mass.end(), 0);
    for (const Entry& e : entries) mass[bin_of(e)] += e.weight;
    const std::size_t bin = crossing(mass, target, above);
    if (bin == mass.size()) return {low->x, kAll};  // missed by rounding only
    const auto end =
        std::remove_if(entries.begin(), entries.end(), [&](const Entry& e) { return bin_of(e) != bin; });
    entries = entries.first(static_cast<std::size_t>(end - entries.begin()));
  }
  const auto before = [](const Entry& a, const Entry& b) {
    return a.x > b.x || (a.x == b.x && a.pos < b.pos);
  };
  if (entries.size() <= kSortAtMost) std::sort(entries.begin(), entries.end(), before);
  for (const Entry& e : entries) {
    above += e.weight;
    if (above >= target) return {e.x, e.pos};
  }
  return entries.empty() ? Cut{} : Cut{entries.back().x, kAll};
}

// Where a prefix of the row ends: at the k-th token (Weighted false, target k), or where the weights first
// reach a fraction of their sum (Weighted true, target the fraction). `hi` is the largest logit. The cut is
// expected at `lo` or above; without weights it must not be below. A histogram finds the bin in which the
// target is crossed; only its tokens are looked at one by one. A target out of reach keeps everything.
template <bool Weighted>
Cut find_cut(const Row& row, std::span<const float> block_max, float lo, float hi, double target,
             CutScratch& scratch) {
  if (!Weighted && lo == hi) {
    for (std::size_t pos = 0; pos < row.size; ++pos) {
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
    if (!Weighted && block_max[b] < lo) continue;
    F4 below = {};
    for (std::size_t i = 0; i < kBlock; i += 16) {
      const float* x = row.block(b) + i;
      F4 w[4];
      I4 counted = {};
      for (std::size_t j = 0; j < 4; ++j) {
        const F4 v = load4(x + 4 * j);
        if constexpr (Weighted) {
          w[j] = weigh(v, splat(weigh.least()));
          store4(weights + 4 * j, w[j]);
        }
        store4(bins + 4 * j, bin_of(v));
        counted |= v >= splat(lo);
      }
      if (any(counted)) {
        for (std::size_t j = 0; j < 16; ++j) {
          mass[static_cast<std::size_t>(bins[j])] += Weighted ? static_cast<double>(weights[j]) : 1.0;
        }
      } else if constexpr (Weighted) {
        below += (w[0] + w[1]) + (w[2] + w[3]);
      }
    }
    mass[kBins] += sum_of(below);
  }
  if constexpr (Weighted) target *= std::accumulate(mass.begin(), mass.end(), 0.0);
  double above = 0;
  const std::size_t bin = crossing(mass, target, above);
  if (bin > kBins) return {};

  std::size_t m = 0;
  const auto wanted = static_cast<std::int32_t>(bin);
  for (std::size_t b = 0; b < row.n_blocks(); ++b) {
    if (bin_of(block_max[b]) > wanted) continue;
    for (std::size_t i = 0; i < kBlock; i += 16) {
      const float* x = row.block(b) + i;
      I4 hit[4];
      for (std::size_t j = 0; j < 4; ++j) {
        const F4 v = load4(x + 4 * j);
        hit[j] = (bin_of(v) == I4{wanted, wanted, wanted, wanted}) & (v >= splat(-kMaxFloat));
        store4(bins + 4 * j, hit[j]);
        if constexpr (Weighted) store4(weights + 4 * j, weigh(v, splat(weigh.least())));
      }
      if (!any((hit[0] | hit[1]) | (hit[2] | hit[3]))) continue;
      for (std::size_t j = 0; j < 16; ++j) {
        const auto pos = static_cast<std::uint32_t>(b * kBlock + i + j);
        scratch.entries[m] = {x[j], pos, Weighted ? weights[j] : 1.0f};
        m += bins[j] != 0;
      }
    }
  }
  return find_cut_among(std::span(scratch.entries).first(m), mass, above, target);
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
  float largest = -kInf;
  for (std::size_t i = first_not_finite(logits); i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == kInf) {
      not_finite(logits[i], i, "a finite number or minus infinity");
    }
  }
  std::array<float, kBlock> tail;
  const Row row = row_of(logits, tail);
  for (std::size_t b = 0; b < row.n_blocks(); ++b) largest = std::max(largest, max_of_block(row.block(b)));
  if (largest == -kInf) throw NumericError("every logit is minus infinity; expected at least one finite");
  return largest;
}

// ln of the sum of exp(logits). The terms are floats (2e-7), their sum is a double.
double log_sum_exp(std::span<const float> logits, float max) {
  std::array<float, kBlock> tail;
  const Row row = row_of(logits, tail);
  const Weigher weigh(max, 1);
  double sum = 0;
  for (std::size_t b = 0; b < row.n_blocks(); ++b)
    sum += weigh.block<false>(row.block(b), -kMaxFloat, nullptr);
  return static_cast<double>(max) + std::log(sum);
}

}  // namespace

struct Sampler::Impl {
  SamplerParams params;
  std::size_t n_vocab;
  bool penalize;    // a penalty is on and its window holds something
  float inv_t = 0;  // 1 / temperature
  double log_min_p = 0;
  Rng rng;

  std::vector<std::int32_t> window;  // ring of the latest tokens
  std::size_t window_used = 0;
  std::size_t window_next = 0;
  std::vector<std::int32_t> counts;  // [n_vocab] occurrences in the window

  std::array<float, kBlock> tail{};
  std::array<float, kBlock> edge{};    // the block in which a cut falls
  std::vector<float> block_max;        // [n_blocks]
  std::vector<float> block_order;      // [n_blocks]
  std::vector<double> block_sum;       // [n_blocks]
  std::vector<float> adjusted;         // [n_blocks * kBlock] logits with bias and penalties
  std::vector<float> list;             // [n_blocks * kBlock] logits that top-k keeps, in id order
  std::vector<std::int32_t> list_ids;  // [n_blocks * kBlock]
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

    const std::size_t n_blocks = blocks_for(n_vocab), padded = n_blocks * kBlock;
    block_max.resize(n_blocks);
    block_order.resize(n_blocks);
    block_sum.resize(n_blocks);
    if (penalize) {
      window.resize(static_cast<std::size_t>(params.penalty_window));
      counts.resize(n_vocab);
    }
    if (penalize || !params.logit_bias.empty()) adjusted.resize(padded, -kInf);
    if (params.temperature > 0) {
      if (top_k_on()) {
        list.resize(padded);
        list_ids.resize(padded);
      }
      if (top_k_on() || params.top_p < 1) cut_scratch.entries.resize(padded);
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
  Row adjust(std::span<const float> logits) {
    if (params.logit_bias.empty() && window_used == 0) return row_of(logits, tail);
    std::copy(logits.begin(), logits.end(), adjusted.begin());
    const auto saturate = [](double v) {
      return static_cast<float>(std::clamp<double>(v, -kMaxFloat, kMaxFloat));
    };
    for (const auto& [id, bias] : params.logit_bias) {
      float& x = adjusted[static_cast<std::size_t>(id)];
      x = bias == -kInf || x == -kInf ? -kInf : saturate(x + bias);
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
      v = v > 0 ? v / params.repetition_penalty : v * params.repetition_penalty;
      x = saturate(v - params.presence_penalty - count * params.frequency_penalty);
    }
    for (std::size_t i = 0; i < window_used; ++i) {
      std::int32_t& count = counts[static_cast<std::size_t>(window[i])];
      count = std::abs(count);
    }
    return {adjusted.data(), adjusted.data() + n_vocab / kBlock * kBlock, n_vocab};
  }

  // The k largest logits of the row, in id order.
  Row keep_top_k(const Row& row, float max) {
    const auto k = static_cast<std::size_t>(params.top_k);
    const std::size_t n_blocks = row.n_blocks();
    float lo = kMaxFloat;
    if (k <= n_blocks) {
      // k blocks hold a logit of at least the k-th largest block maximum.
      std::copy(block_max.begin(), block_max.end(), block_order.begin());
      const auto kth = block_order.begin() + static_cast<std::ptrdiff_t>(k - 1);
      std::nth_element(block_order.begin(), kth, block_order.end(), std::greater<>());
      lo = std::max(*kth, -kMaxFloat);
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
    const Cut cut = find_cut<false>(row, block_max, lo, max, static_cast<double>(k), cut_scratch);

    std::size_t m = 0;
    for (std::size_t b = 0; b < n_blocks; ++b) {
      if (block_max[b] < cut.lowest) continue;
      const float* x = row.block(b);
      for (std::size_t i = 0; i < kBlock; ++i) {
        const std::size_t pos = b * kBlock + i;
        list[m] = x[i];
        list_ids[m] = static_cast<std::int32_t>(pos);
        m += x[i] > cut.lowest || (x[i] == cut.lowest && pos <= cut.last);
      }
    }
    const Row kept{list.data(), list.data() + m / kBlock * kBlock, m, list_ids.data()};
    std::fill(list.begin() + static_cast<std::ptrdiff_t>(m),
              list.begin() + static_cast<std::ptrdiff_t>(kept.n_blocks() * kBlock), -kInf);
    block_maxima(kept, block_max);
    return kept;
  }

  // Where top-p cuts the row. Tokens that each have less than (1 - p) / size of the largest weight do not
  // have 1 - p of the sum together, so the cut lies above them.
  Cut nucleus(const Row& row, float max) {
    const double floor = log_positive((1 - params.top_p) / static_cast<double>(row.size)) - 1e-3;
    const float lo = std::max(std::nextafter(float_not_below(max + floor), -kInf), -kMaxFloat);
    return find_cut<true>(row, block_max, lo, max, params.top_p, cut_scratch);
  }

  // Draws among the tokens that the cut keeps; they are visited by ascending id.
  std::int32_t draw(const Row& row, Cut cut, float max) {
    const std::size_t edge_block = cut.last / kBlock;
    const float above = std::nextafter(cut.lowest, kInf);
    const Weigher weigh(max, inv_t);
    const auto weigh_block = [&](std::size_t b, float* out) {
      if (block_max[b] < cut.lowest) return 0.0;
      const float* x = row.block(b);
      if (b == edge_block) {
        std::copy(x, x + kBlock, edge.begin());
        for (std::size_t i = cut.last % kBlock + 1; i < kBlock; ++i) {
          if (edge[i] == cut.lowest) edge[i] = -kInf;
        }
        x = edge.data();
      }
      const float lowest = b > edge_block ? above : cut.lowest;
      return out ? weigh.block<true>(x, lowest, out) : weigh.block<false>(x, lowest, out);
    };

    double total = 0;
    for (std::size_t b = 0; b < row.n_blocks(); ++b) {
      block_sum[b] = weigh_block(b, nullptr);
      total += block_sum[b];
    }
    double left = rng.uniform() * total;
    std::size_t chosen = 0;
    for (std::size_t b = 0; b < row.n_blocks(); ++b) {
      if (block_sum[b] == 0) continue;
      chosen = b;
      if (left < block_sum[b]) break;
      left -= block_sum[b];
    }
    std::array<float, kBlock> w;
    weigh_block(chosen, w.data());
    // The sum of a block is rounded differently from this one: the last token takes the difference.
    std::size_t pos = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      if (w[i] == 0) continue;
      pos = i;
      if (left < static_cast<double>(w[i])) break;
      left -= static_cast<double>(w[i]);
    }
    return row.id(chosen * kBlock + pos);
  }

  std::int32_t sample(std::span<const float> logits) {
    if (logits.size() != n_vocab) {
      throw InvalidArgument("there are " + std::to_string(logits.size()) + " logits; expected " +
                            std::to_string(n_vocab) + ", one per token of the vocabulary");
    }
    const std::size_t bad = first_not_finite(logits);
    if (bad < n_vocab) not_finite(logits[bad], bad, "a finite number; the model's output is unusable");

    Row row = adjust(logits);
    const float max = block_maxima(row, block_max);
    std::int32_t token = 0;
    if (params.temperature == 0) {
      const auto b =
          static_cast<std::size_t>(std::find(block_max.begin(), block_max.end(), max) - block_max.begin());
      const float* x = row.block(b);
      token = static_cast<std::int32_t>(b * kBlock) +
              static_cast<std::int32_t>(std::find(x, x + kBlock, max) - x);
    } else {
      if (top_k_on()) row = keep_top_k(row, max);
      Cut cut;
      if (params.top_p < 1) cut = nucleus(row, max);
      if (params.min_p > 0) {
        const float lowest = float_not_below(max + log_min_p);
        if (lowest > cut.lowest) cut = {lowest, kAll};
      }
      token = draw(row, cut, max);
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
  return static_cast<std::int32_t>(std::find(logits.begin(), logits.end(), max) - logits.begin());
}

float log_probability(std::span<const float> logits, std::int32_t id) {
  const float max = checked_max(logits);
  if (id < 0 || static_cast<std::size_t>(id) >= logits.size()) {
    throw InvalidArgument("token id is " + std::to_string(id) + "; expected 0 to " +
                          std::to_string(logits.size() - 1));
  }
  return static_cast<float>(logits[static_cast<std::size_t>(id)] - log_sum_exp(logits, max));
}

std::vector<LogProb> top_log_probabilities(std::span<const float> logits, std::int32_t k) {
  const float max = checked_max(logits);
  if (k < 0) out_of_range("k", k, "at least 0");
  const std::size_t n = std::min(static_cast<std::size_t>(k), logits.size());
  const double lse = log_sum_exp(logits, max);
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
  for (LogProb& p : best) p.logprob = static_cast<float>(p.logprob - lse);
  return best;
}

}  // namespace ringlm

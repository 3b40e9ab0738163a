// Which rows of a step are no longer numbers.
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/ops.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Whether all magnitudes are at most `largest`; NaN is not.
bool all_within(std::span<const float> x, float largest) {
  unsigned bad = 0;
  for (const float v : x) bad |= std::fabs(v) <= largest ? 0u : 1u;
  return bad == 0;
}

// The most that a key or value may be. From 65520 on, rounding to f16 gives infinity: the element, or the
// scale.
float largest(KvFormat format) {
  const float half = std::nextafter(65520.0f, 0.0f);
  return format == KvFormat::F16    ? half
         : format == KvFormat::Int8 ? 127.0f * half
                                    : std::numeric_limits<float>::max();
}

}  // namespace

void mark_unfit_rows(const Config& c, const Step& s) {
  const std::size_t n = size(c.kv_dim());
  for (std::size_t m = 0; m < s.rows.size(); ++m) {
    const kv::Layout& l = s.rows[m].kv->layout();
    if (!all_within(s.a.k.subspan(m * n, n), largest(l.k_format)) ||
        !all_within(s.a.v.subspan(m * n, n), largest(l.v_format))) {
      s.bad[m] = 1;
    }
  }
}

void mark_rows_not_finite(const Config& c, const Step& s) {
  constexpr float most = std::numeric_limits<float>::max();
  for (std::size_t m = 0; m < s.rows.size(); ++m) {
    const float* logits = s.rows[m].logits;
    if (!all_within(s.a.x.subspan(m * size(c.n_embd), size(c.n_embd)), most) ||
        (logits && !all_within({logits, size(c.n_vocab)}, most))) {
      s.bad[m] = 1;
    }
  }
}

}  // namespace ringlm

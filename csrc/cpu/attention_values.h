// Weights of a span, and the values of a tile times them: a lane is an element of the head, and positions are
// added in their order. INT8 values are multiplied as integers, with weights in 24 bits as three unsigned
// digits and one scale per tile and query.
#pragma once

#include "cpu/attention_tiles.h"
#if defined(__AMX_INT8__)
#include "cpu/attention_amx.h"
#endif

namespace ringlm::cpu {
namespace {

// Scores to weights e^(score - largest), zero where the query sees nothing. A NaN score makes the total NaN.
Partial softmax(float* scores, Range seen, Range filled, float softcap) {
  const f32x16 zero = set1(0.0f);
  const std::int32_t none = seen.begin >= seen.end;
  const std::int32_t first = none ? filled.begin : seen.begin / kLanes * kLanes;
  const std::int32_t last = none ? filled.begin : (seen.end + kLanes - 1) / kLanes * kLanes;
  for (std::int32_t t = filled.begin; t < first; t += kLanes) store(scores + t, zero);
  for (std::int32_t t = last; t < filled.end; t += kLanes) store(scores + t, zero);
  if (none) return {-__builtin_inff(), 0.0f};

  const auto masked = [&](std::int32_t t, f32x16 x, float other) {
    const std::int32_t begin = seen.begin - t, end = seen.end - t;
    return begin <= 0 && end >= kLanes ? x
                                       : keep(x, begin > 0 ? begin : 0, end < kLanes ? end : kLanes, other);
  };
  for (std::int32_t t = first; softcap > 0.0f && t < last; t += kLanes) {
    store(scores + t, soft_capped(load(scores + t), softcap));
  }
  f32x16 most = set1(-__builtin_inff());
  for (std::int32_t t = first; t < last; t += kLanes) {
    most = larger(most, masked(t, load(scores + t), -__builtin_inff()));
  }
  const float largest = reduce_max(most);
  f32x16 total = zero;
  for (std::int32_t t = first; t < last; t += kLanes) {
    const f32x16 weight = masked(t, exp_negative(load(scores + t) - set1(largest)), 0.0f);
    total = total + weight;
    store(scores + t, weight);
  }
  return {largest, reduce_add(total)};
}

// sums [R, width] += weights of R queries times n consecutive rows.
template <int D, int R, class Element>
void weigh_floats(const std::uint8_t* row, std::int64_t stride, std::int32_t n, const float* weights,
                  float* sums, std::int64_t width, Ahead& ahead) {
  f32x16 acc[R][D];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < D; ++j) acc[r][j] = load(sums + r * width + j * kLanes);
  }
  for (std::int32_t t = 0; t < n; ++t, row += stride) {
    ahead.fetch(D * kLanes * Element::kBytes);
    f32x16 v[D];
    for (int j = 0; j < D; ++j) v[j] = Element::at(row + j * kLanes * Element::kBytes);
    for (int r = 0; r < R; ++r) {
      const f32x16 weight = set1(weights[r * kSpan + t]);
      for (int j = 0; j < D; ++j) acc[r][j] = fma(weight, v[j], acc[r][j]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < D; ++j) store(sums + r * width + j * kLanes, acc[r][j]);
  }
}

template <int R, class Element>
void weigh_rows(const std::uint8_t* row, std::int64_t stride, std::int32_t n, std::int32_t vectors,
                const float* weights, float* sums, std::int64_t width, Ahead& ahead) {
  std::int32_t v = 0;
  for (; v + kElementVectors <= vectors; v += kElementVectors) {
    weigh_floats<kElementVectors, R, Element>(row + v * kLanes * Element::kBytes, stride, n, weights,
                                              sums + v * kLanes, width, ahead);
  }
  for (; v < vectors; ++v) {
    weigh_floats<1, R, Element>(row + v * kLanes * Element::kBytes, stride, n, weights, sums + v * kLanes,
                                width, ahead);
  }
}

template <class Element>
void weigh_stored(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums, Ahead& ahead) {
  const std::int64_t stride = a.head_dim * static_cast<std::int64_t>(Element::kBytes);
  in_blocks(a.n, [&](auto count, std::int32_t first) {
    const Range seen = cut(seen_by<count.value>(a.seen + first), tile);
    const auto run = [&](std::int32_t begin, std::int32_t end, std::int64_t shift) {
      if (begin >= end) return;
      weigh_rows<count.value, Element>(a.v.data + (begin + shift) * stride, stride, end - begin,
                                       a.head_dim / kLanes,
                                       w.scores + static_cast<std::int64_t>(first) * kSpan + begin,
                                       sums + first * w.width, w.width, ahead);
    };
    run(seen.begin, seen.end < a.wrap ? seen.end : a.wrap, a.slot - a.all.begin);
    run(seen.begin > a.wrap ? seen.begin : a.wrap, seen.end, a.wrapped - a.wrap);
  });
}

// Through a copy as float32: rows that are no whole vectors, or many queries that read each.
template <class Element>
void weigh_staged(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums, Ahead& ahead) {
  const Slots slots(a, tile);
  const Range all = cut(a.all, tile);
  const std::int64_t row_bytes = a.head_dim * static_cast<std::int64_t>(Element::kBytes);
  const std::int64_t whole = a.head_dim / kLanes * kLanes;
  slots.rows(a.v.data, row_bytes, [&](auto rows) {
    for (std::int32_t t = all.begin - tile * kTile; t < all.end - tile * kTile; ++t) {
      const std::uint8_t* row = rows(t);
      float* out = w.staged + t * w.width;
      for (std::int64_t i = 0; i < whole; i += kLanes) store(out + i, Element::at(row + i * Element::kBytes));
      if (whole == a.head_dim) continue;
      const std::int64_t at = whole * Element::kBytes;
      std::uint8_t rest[64] = {};
      std::memcpy(rest, row + at, static_cast<std::size_t>(row_bytes - at));
      store(out + whole, Element::at(rest));
    }
  });
  in_blocks(a.n, [&](auto count, std::int32_t first) {
    const Range seen = cut(seen_by<count.value>(a.seen + first), tile);
    if (seen.begin >= seen.end) return;
    const float* rows = w.staged + (seen.begin - tile * kTile) * w.width;
    weigh_rows<count.value, ElementF32>(reinterpret_cast<const std::uint8_t*>(rows), 4 * w.width,
                                        seen.end - seen.begin, (a.head_dim + kLanes - 1) / kLanes,
                                        w.scores + static_cast<std::int64_t>(first) * kSpan + seen.begin,
                                        sums + first * w.width, w.width, ahead);
  });
}

// Weights times the scales of the rows, as integers of 24 bits in three digits: w.digits, w.weight_scales.
void quantize_weights(const Workspace& w, std::int32_t i, std::int32_t n, std::int32_t tile,
                      const float (&scales)[kTile]) {
  constexpr float kMost = 16777000.0f;  // below 2^24 however the products are rounded
  const float* weights = w.scores + static_cast<std::int64_t>(i) * kSpan + tile * kTile;
  f32x16 scaled[kVectors];
  f32x16 most = set1(0.0f);
  for (int v = 0; v < kVectors; ++v) {
    scaled[v] = load(weights + v * kLanes) * load(scales + v * kLanes);
    most = larger(most, scaled[v]);
  }
  const float largest = reduce_max(most);
  // Below that no weight matters, and its inverse would overflow.
  const f32x16 inverse = set1(largest > 1e-30f ? kMost / largest : 0.0f);
  std::uint8_t* digits = w.digits + i * kTile;
  const std::int64_t plane = std::int64_t{n} * kTile;
  for (int v = 0; v < kVectors; ++v) {
    const i32x16 code = to_nearest(scaled[v] * inverse), upper = over_power<8>(code);
    store_low_bytes(digits + v * kLanes, over_power<8>(upper));
    store_low_bytes(digits + plane + v * kLanes, upper);
    store_low_bytes(digits + 2 * plane + v * kLanes, code);
  }
  w.weight_scales[i] = largest > 1e-30f ? largest / kMost : 0.0f;
}

// sum += products of the digits of weights with codes, times scale.
void put_sum(float* sum, i32x16 product, float scale) {
  store(sum, fma(to_f32(product), set1(scale), load(sum)));
}

#if defined(__AMX_INT8__)
void weigh_codes_on_tiles(const Workspace& w, std::int32_t n, float* sums) {
  const DigitTiles tiles(n);
  const auto* words = reinterpret_cast<const std::uint8_t*>(w.staged);
  DigitTiles::Products products[4];
  for (std::int32_t i = 0; i < n; i += tiles.rows()) {
    const std::int32_t first = tiles.block(i);
    for (std::int64_t at = 0; at < w.width; at += 4 * kLanes) {
      tiles.multiply<false>(w.digits + first * kTile, kTile, words + 4 * at, 4 * w.width, 1, 4, products);
      for (std::int32_t j = i - first; j < tiles.rows(); ++j) {
        float* sum = sums + (first + j) * w.width + at;
        const float scale = w.weight_scales[first + j];
        for (int v = 0; v < 4; ++v, sum += kLanes) {
          const DigitTiles::Products& p = products[v];
          put_sum(sum, p(2, j), scale);
          put_sum(sum, times_256(p(0, j)) + p(1, j), scale * 256.0f);
        }
      }
    }
  }
}
#endif

template <int R>
void weigh_codes(const Workspace& w, std::int32_t first, std::int32_t n, std::int32_t vectors, Range fours,
                 float* sums) {
  constexpr int D = kElementVectors;
  const auto* staged = reinterpret_cast<const std::uint8_t*>(w.staged);
  for (std::int32_t v = 0; v < vectors; v += D) {
    i32x16 acc[R][D];
    const auto clear = [&] {
      for (int r = 0; r < R; ++r) {
        for (int j = 0; j < D; ++j) acc[r][j] = set1_i32(0);
      }
    };
    const auto add_digit = [&](int plane) {
      const std::uint8_t* digits = w.digits + (plane * n + first) * kTile;
      for (std::int32_t t = fours.begin; t < fours.end; ++t) {
        u32x16 codes[D];
        for (int j = 0; j < D; ++j) codes[j] = load_words(staged + 4 * (t * w.width + (v + j) * kLanes));
        for (int r = 0; r < R; ++r) {
          const u32x16 four = set1_u32(blocks::u32_at(digits + r * kTile + 4 * t));
          for (int j = 0; j < D; ++j) acc[r][j] = dot4(acc[r][j], four, codes[j]);
        }
      }
    };
    const auto put = [&](float times) {
      for (int r = 0; r < R; ++r) {
        float* sum = sums + (first + r) * w.width + v * kLanes;
        for (int j = 0; j < D; ++j) put_sum(sum + j * kLanes, acc[r][j], w.weight_scales[first + r] * times);
      }
    };
    clear();
    add_digit(2);
    put(1.0f);
    clear();
    add_digit(0);
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < D; ++j) acc[r][j] = times_256(acc[r][j]);
    }
    add_digit(1);
    put(256.0f);
  }
}

void weigh_int8(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums, Ahead& ahead) {
  const Slots slots(a, tile);
  const Range all = cut(a.all, tile);
  const auto in_fours = [&](Range r) {
    return Range{(r.begin - tile * kTile) / 4, (r.end - tile * kTile + 3) / 4};
  };
  const Range staged = in_fours(all);
  auto* out = reinterpret_cast<std::uint32_t*>(w.staged);
  constexpr std::uint32_t kFlip = 0x80808080u;  // codes become signed
  float scales[kTile];
  load_scales(a.v, slots, scales);
  for (std::int32_t i = 0; i < a.n; ++i) quantize_weights(w, i, a.n, tile, scales);
  slots.rows(a.v.data, a.head_dim, [&](auto rows) {
    for (std::int32_t t = staged.begin; t < staged.end; ++t) {
      const auto four = rows.from(4 * t);
      ahead.fetch(4 * a.head_dim);
      std::int32_t at = 0;
      for (; at + 64 <= a.head_dim; at += 64) {
        interleave(four, static_cast<std::size_t>(at), out + t * w.width + at, kFlip);
      }
      if (at == a.head_dim) continue;
      const Padded<4> rest(four, at, a.head_dim - at);
      interleave(rest.rows(), 0, out + t * w.width + at, kFlip);
    }
  });
#if defined(__AMX_INT8__)
  weigh_codes_on_tiles(w, a.n, sums);
#else
  in_blocks(a.n, [&](auto count, std::int32_t first) {
    const Range seen = cut(seen_by<count.value>(a.seen + first), tile);
    if (seen.begin >= seen.end) return;
    const auto vectors =
        static_cast<std::int32_t>(kLaced ? w.width / kLanes : (a.head_dim + kLanes - 1) / kLanes);
    weigh_codes<count.value>(w, first, a.n, vectors, in_fours(seen), sums);
  });
#endif
}

void weigh_tile(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums, Ahead& ahead) {
  switch (a.v.format) {
    case KvFormat::F32:
      return a.head_dim % kLanes == 0 ? weigh_stored<ElementF32>(a, w, tile, sums, ahead)
                                      : weigh_staged<ElementF32>(a, w, tile, sums, ahead);
    case KvFormat::F16:
      return a.head_dim % kLanes == 0 && a.n <= kBlock ? weigh_stored<ElementF16>(a, w, tile, sums, ahead)
                                                       : weigh_staged<ElementF16>(a, w, tile, sums, ahead);
    case KvFormat::Int8:
      return weigh_int8(a, w, tile, sums, ahead);
  }
}

}  // namespace
}  // namespace ringlm::cpu

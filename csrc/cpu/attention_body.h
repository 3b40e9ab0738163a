// Attention of one block of queries over one span of positions. Included by kernels_body.h, under its rules.
//
// For one query (decode) and for many (prefill) every number is computed in the same order.
#pragma once

#include "cpu/attention_scores.h"
#include "cpu/attention_values.h"

namespace ringlm::cpu {
namespace {

void attend_span(const SpanArgs& a, float* memory, Partial* parts, float* sums) {
  const Workspace w(memory, a.head_dim, a.n);
  const std::int32_t begin = a.all.begin / kTile, end = (a.all.end + kTile - 1) / kTile;
#if defined(__AMX_INT8__)
  const bool on_tiles = a.k.format == KvFormat::Int8 || a.v.format == KvFormat::Int8;
  if (on_tiles) DigitTiles(a.n).configure();
#endif
  // While scores are made the values come, and during the sums over them the keys of the next span.
  const auto v_bytes = a.head_dim * static_cast<std::int64_t>(element_bytes(a.v.format));
  const bool few = a.n <= kBlock;
  Ahead values(few ? a.v.data + a.slot * v_bytes : nullptr), keys(few ? a.next_keys : nullptr);
  for (std::int32_t tile = begin; tile < end; ++tile) score_tile(a, w, tile, values);
  const Range filled{begin * kTile, end * kTile};
  for (std::int32_t i = 0; i < a.n; ++i) {
    parts[i] = softmax(w.scores + static_cast<std::int64_t>(i) * kSpan, a.seen[i], filled, a.softcap);
  }
  std::memset(sums, 0, static_cast<std::size_t>(a.n * w.width) * sizeof(float));
  for (std::int32_t tile = begin; tile < end; ++tile) weigh_tile(a, w, tile, sums, keys);
#if defined(__AMX_INT8__)
  if (on_tiles) _tile_release();
#endif
  if (kLaced && a.v.format == KvFormat::Int8) {
    for (std::int64_t i = 0; i < a.n * w.width; i += 64) unlace(sums + i);
  }
}

void merge(Partial& into, float* into_sum, const Partial& from, const float* from_sum, std::int32_t width) {
  const float largest = from.largest <= into.largest ? into.largest : from.largest;
  float weights[kLanes] = {into.largest - largest, from.largest - largest};
  store(weights, exp_negative(load(weights)));
  into.largest = largest;
  into.total = into.total * weights[0] + from.total * weights[1];
  const f32x16 a = set1(weights[0]), b = set1(weights[1]);
  for (std::int32_t i = 0; i < width; i += kLanes) {
    store(into_sum + i, load(into_sum + i) * a + load(from_sum + i) * b);
  }
}

void finish(const Partial& part, const float* sum, float* out, std::int32_t head_dim) {
  const float scale = 1.0f / part.total;
  for (std::int32_t i = 0; i < head_dim; ++i) out[i] = sum[i] * scale;
}

}  // namespace
}  // namespace ringlm::cpu

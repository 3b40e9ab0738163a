// Scores of a tile: its keys are turned over, so that a lane is a key and a score is a sum over the head's
// elements in their order. INT8 keys are multiplied as integers, with queries in 24 bits as three signed
// digits.
#pragma once

#include "cpu/attention_tiles.h"
#if defined(__AMX_INT8__)
#include "cpu/attention_amx.h"
#endif

namespace ringlm::cpu {
namespace {

// Keys of 32-bit elements (INT8: four codes) to staged [elements][kTile].
template <class Rows>
void stage_keys_32(Rows rows, Range vectors, std::int64_t row_bytes, float* staged, Ahead& ahead) {
  auto* out = reinterpret_cast<std::uint32_t*>(staged);
  for (int v = vectors.begin; v < vectors.end; ++v) {
    const Rows sixteen = rows.from(v * kLanes);
    std::int64_t at = 0;
    for (; at + 64 <= row_bytes; at += 64) {
      ahead.fetch(kLanes * 64);
      transpose(sixteen, static_cast<std::size_t>(at), out + at / 4 * kTile + v * kLanes, kTile);
    }
    if (at == row_bytes) continue;
    const Padded<kLanes> rest(sixteen, at, row_bytes - at);
    transpose(rest.rows(), 0, out + at / 4 * kTile + v * kLanes, kTile);
  }
}

#if defined(__AVX512F__)
// Keys of 16-bit elements to staged [elements][kTile], first as they are.
template <class Rows>
void stage_keys_16(Rows rows, Range vectors, std::int64_t row_bytes, float* staged, Ahead& ahead) {
  auto* out = reinterpret_cast<std::uint16_t*>(staged);
  for (int v = vectors.begin / 2 * 2; v < vectors.end; v += 2) {
    const Rows thirty_two = rows.from(v * kLanes);
    std::int64_t at = 0;
    for (; at + 32 <= row_bytes; at += 32) {
      ahead.fetch(2 * kLanes * 32);
      transpose_u16(thirty_two, static_cast<std::size_t>(at), out + at / 2 * kTile + v * kLanes, kTile);
    }
    if (at == row_bytes) continue;
    const Padded<2 * kLanes> rest(thirty_two, at, row_bytes - at);
    transpose_u16(rest.rows(), 0, out + at / 2 * kTile + v * kLanes, kTile);
  }
}
// Then as float32, in place from behind.
void widen_staged(float* staged, std::int64_t elements) {
  const auto* halves = reinterpret_cast<const std::uint8_t*>(staged);
  for (std::int64_t i = elements * kTile - kLanes; i >= 0; i -= kLanes) {
    store(staged + i, load_f16(halves + 2 * i));
  }
}
using StagedF16 = ElementF16;
#else
template <class Rows>
void stage_keys_16(Rows rows, Range vectors, std::int64_t row_bytes, float* staged, Ahead& ahead) {
  auto* out = reinterpret_cast<std::uint32_t*>(staged);
  for (int v = vectors.begin; v < vectors.end; ++v) {
    for (std::int64_t at = 0; at < row_bytes; at += 32) {
      ahead.fetch(kLanes * 32);
      const std::int64_t left = row_bytes - at;
      float wide[kLanes][kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const std::uint8_t* halves = rows(v * kLanes + i) + at;
        std::uint8_t rest[32] = {};
        if (left < 32) {
          std::memcpy(rest, halves, static_cast<std::size_t>(left));
          halves = rest;
        }
        store(wide[i], load_f16(halves));
      }
      const Strided block{reinterpret_cast<const std::uint8_t*>(wide[0]), sizeof wide[0]};
      transpose(block, 0, out + at / 2 * kTile + v * kLanes, kTile);
    }
  }
}
void widen_staged(float*, std::int64_t) {}
using StagedF16 = ElementF32;
#endif

// Scores of R queries against the staged keys of a tile.
template <int R, class Element>
void score_floats(const SpanArgs& a, const Workspace& w, std::int32_t first, std::int32_t tile,
                  Range vectors) {
  constexpr int V = key_vectors(R);
  const float* q = w.queries + first * w.width;
  for (int v = vectors.begin / V * V; v < vectors.end; v += V) {
    f32x16 acc[R][V];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) acc[r][j] = set1(0.0f);
    }
    const std::uint8_t* keys = reinterpret_cast<const std::uint8_t*>(w.staged) + v * kLanes * Element::kBytes;
    for (std::int32_t i = 0; i < a.head_dim; ++i) {
      f32x16 k[V];
      for (int j = 0; j < V; ++j) k[j] = Element::at(keys + (i * kTile + j * kLanes) * Element::kBytes);
      for (int r = 0; r < R; ++r) {
        const f32x16 qi = set1(q[r * w.width + i]);
        for (int j = 0; j < V; ++j) acc[r][j] = fma(qi, k[j], acc[r][j]);
      }
    }
    for (int r = 0; r < R; ++r) {
      const float scale = w.query_scales[first + r];
      const float offset = a.offsets ? a.offsets[tile * a.n + first + r] * a.scale : 0.0f;
      float* out = w.scores + static_cast<std::int64_t>(first + r) * kSpan + tile * kTile + v * kLanes;
      for (int j = 0; j < V; ++j) store(out + j * kLanes, fma(acc[r][j], set1(scale), set1(offset)));
    }
  }
}

// From the products of the digits of query i with codes, as they come, to scores of sixteen keys.
void put_score(const SpanArgs& a, const Workspace& w, std::int32_t i, std::int32_t tile, int v, i32x16 upper,
               i32x16 lower, f32x16 key_scales) {
  const std::int32_t* bias = w.biases + 2 * i;
  const f32x16 product =
      fma(to_f32(upper - set1_i32(bias[0])), set1(256.0f), to_f32(lower - set1_i32(bias[1])));
  const float offset = a.offsets ? a.offsets[tile * a.n + i] * a.scale : 0.0f;
  store(w.scores + std::int64_t{i} * kSpan + tile * kTile + v * kLanes,
        fma(product, set1(w.query_scales[i]) * key_scales, set1(offset)));
}

#if defined(__AMX_INT8__)
void score_codes_on_tiles(const SpanArgs& a, const Workspace& w, const float (&scales)[kTile],
                          std::int32_t tile) {
  const DigitTiles tiles(a.n);
  const auto* words = reinterpret_cast<const std::uint8_t*>(w.staged);
  DigitTiles::Products products[kVectors];
  for (std::int32_t i = 0; i < a.n; i += tiles.rows()) {
    const std::int32_t first = tiles.block(i);
    Range seen = a.seen[first];
    for (std::int32_t j = first; j < first + tiles.rows(); ++j) seen = both(seen, a.seen[j]);
    seen = cut(seen, tile);
    if (seen.begin >= seen.end) continue;
    const Range vectors = seen_vectors(seen, tile);
    tiles.multiply<true>(w.digits_of(0, first, a.n), w.width, words + 4 * vectors.begin * kLanes, 4 * kTile,
                         static_cast<std::int32_t>(w.width / 64), vectors.end - vectors.begin, products);
    for (int v = vectors.begin; v < vectors.end; ++v) {
      const DigitTiles::Products& p = products[v - vectors.begin];
      const f32x16 key_scales = load(scales + v * kLanes);
      for (std::int32_t j = 0; j < tiles.rows(); ++j) {
        put_score(a, w, first + j, tile, v, times_256(p(0, j)) + p(1, j), p(2, j), key_scales);
      }
    }
  }
}
#endif

template <int R>
void score_codes(const SpanArgs& a, const Workspace& w, const float (&scales)[kTile], std::int32_t first,
                 std::int32_t tile, Range vectors) {
  constexpr int V = key_vectors(R);
  const std::int32_t groups = (a.head_dim + 3) / 4;
  for (int v = vectors.begin / V * V; v < vectors.end; v += V) {
    const std::uint8_t* keys = reinterpret_cast<const std::uint8_t*>(w.staged + v * kLanes);
    i32x16 acc[R][V], upper[R][V];
    const auto add_digit = [&](int plane) {
      const std::uint8_t* digits = w.digits_of(plane, first, a.n);
      for (std::int32_t i = 0; i < groups; ++i) {
        u32x16 k[V];
        for (int j = 0; j < V; ++j) k[j] = load_words(keys + 4 * (i * kTile + j * kLanes));
        for (int r = 0; r < R; ++r) {
          const u32x16 four = set1_u32(blocks::u32_at(digits + r * w.width + 4 * i));
          for (int j = 0; j < V; ++j) acc[r][j] = dot4(acc[r][j], k[j], four);
        }
      }
    };
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) acc[r][j] = set1_i32(0);
    }
    add_digit(0);
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) acc[r][j] = times_256(acc[r][j]);
    }
    add_digit(1);
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) {
        upper[r][j] = acc[r][j];
        acc[r][j] = set1_i32(0);
      }
    }
    add_digit(2);
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < V; ++j) {
        put_score(a, w, first + r, tile, v + j, upper[r][j], acc[r][j], load(scales + (v + j) * kLanes));
      }
    }
  }
}

// Scores of all queries in one tile; those of positions that a query does not see are left undefined.
void score_tile(const SpanArgs& a, const Workspace& w, std::int32_t tile, Ahead& ahead) {
  const Slots slots(a, tile);
  const std::int64_t row_bytes = a.head_dim * static_cast<std::int64_t>(element_bytes(a.k.format));
  const Range vectors = seen_vectors(a.all, tile);
  const auto each = [&](auto score) {
    in_blocks(a.n, [&](auto count, std::int32_t first) {
      const Range seen = cut(seen_by<count.value>(a.seen + first), tile);
      if (seen.begin < seen.end) score(count, first, seen_vectors(seen, tile));
    });
  };
  if (a.k.format == KvFormat::Int8) {
    float scales[kTile];
    load_scales(a.k, slots, scales);
    slots.rows(a.k.data, row_bytes,
               [&](auto rows) { stage_keys_32(rows, vectors, row_bytes, w.staged, ahead); });
#if defined(__AMX_INT8__)
    score_codes_on_tiles(a, w, scales, tile);
#else
    each([&](auto count, std::int32_t first, Range v) {
      score_codes<count.value>(a, w, scales, first, tile, v);
    });
#endif
    return;
  }
  if (a.k.format == KvFormat::F32) {
    slots.rows(a.k.data, row_bytes,
               [&](auto rows) { stage_keys_32(rows, vectors, row_bytes, w.staged, ahead); });
  } else {
    slots.rows(a.k.data, row_bytes,
               [&](auto rows) { stage_keys_16(rows, vectors, row_bytes, w.staged, ahead); });
    if (a.n <= kBlock) {  // each is read once
      return each([&](auto count, std::int32_t first, Range v) {
        score_floats<count.value, StagedF16>(a, w, first, tile, v);
      });
    }
    widen_staged(w.staged, a.head_dim);
  }
  each([&](auto count, std::int32_t first, Range v) {
    score_floats<count.value, ElementF32>(a, w, first, tile, v);
  });
}

}  // namespace
}  // namespace ringlm::cpu

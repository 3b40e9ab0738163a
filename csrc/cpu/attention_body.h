// Attention of one block of queries over one span of positions. Included by kernels_body.h, under its rules.
//
// A tile of keys is turned over, so that a lane is a key and a score is a sum over the head's elements in
// their order: for one query (decode) and for many (prefill) the same. INT8 keys are multiplied as integers,
// with queries in 24 bits as three signed digits. For values a lane is an element of the head, and positions
// are added in their order; INT8 values are multiplied as integers too, with weights in 24 bits as three
// unsigned digits and one scale per tile and query.
#pragma once

#include "cpu/attention_simd.h"
#include "cpu/kernels.h"
#include "gguf/blocks.h"
#include "kv/row.h"

#if defined(__AMX_INT8__)
#include "cpu/attention_amx.h"
#endif

namespace ringlm::cpu {
namespace {

constexpr int kVectors = kTile / kLanes;

// How many queries share an operand in registers, and how many vectors of keys or of elements go with them.
constexpr int kBlock = 6;
#if defined(__AVX512F__)
constexpr int key_vectors(int queries) { return queries <= 3 ? 4 : 2; }
constexpr int kElementVectors = 4;
#else
constexpr int key_vectors(int) { return 1; }
constexpr int kElementVectors = 1;
#endif

template <int N>
struct Int {
  static constexpr int value = N;
};

// f(Int<count>, first) for n queries in blocks of at most kBlock.
template <class F>
void in_blocks(int n, F f) {
  for (int i = 0; i < n;) {
    const int left = n - i, count = left <= kBlock ? left : left <= kBlock + 2 ? 4 : kBlock;
    switch (count) {
      case 1:
        f(Int<1>{}, i);
        break;
      case 2:
        f(Int<2>{}, i);
        break;
      case 3:
        f(Int<3>{}, i);
        break;
      case 4:
        f(Int<4>{}, i);
        break;
      case 5:
        f(Int<5>{}, i);
        break;
      default:
        f(Int<kBlock>{}, i);
    }
    i += count;
  }
}

// The parts of a thread's workspace (kernels.h: workspace_floats()).
struct Workspace {
  std::int64_t width;
  float* queries;        // [n, width]; of INT8 keys three planes of digits, [n, width] bytes each
  float* staged;         // [kTile, width]: a tile of keys or of values
  float* scores;         // [n, kSpan], then the weights
  std::uint8_t* digits;  // [3, n, kTile] of a tile's weights
  float* query_scales;   // [n]
  float* weight_scales;  // [n]
  std::int32_t* biases;  // [n, 2]: what the zero of the codes adds to the products with a query

  Workspace(float* memory, std::int32_t head_dim, std::int32_t n) : width(state_width(head_dim)) {
    const auto take = [&](std::int64_t floats) {
      float* part = memory;
      memory += floats;
      return part;
    };
    queries = take(n * width);
    staged = take(kTile * width);
    scores = take(std::int64_t{n} * kSpan);
    digits = reinterpret_cast<std::uint8_t*>(take(std::int64_t{n} * kTile * 3 / 4));
    query_scales = take(n);
    weight_scales = take(n);
    biases = reinterpret_cast<std::int32_t*>(take(2 * n));
  }

  std::uint8_t* digits_of(int plane, std::int32_t i, std::int32_t n) const {
    return reinterpret_cast<std::uint8_t*>(queries) + (plane * n + i) * width;
  }
};

// q = scale * integers of 24 bits, in three signed digits. The upper two belong together: products with them
// are summed in 32 bits, so they are not larger than what d codes leave room for.
void quantize_query(const float* q, std::int32_t d, float scale, const Workspace& w, std::int32_t i,
                    std::int32_t n) {
  const std::int32_t fits = 0x7fffffff / kv::kCodeZero / d;
  const float most = 256.0f * static_cast<float>(fits < 32639 ? fits : 32639);
  float* x = w.staged;  // padded with zeros
  std::memcpy(x, q, static_cast<std::size_t>(d) * sizeof(float));
  std::memset(x + d, 0, static_cast<std::size_t>(w.width - d) * sizeof(float));
  f32x16 high = set1(0.0f), low = high, poison = high;  // the last is NaN where an element is not finite
  for (std::int32_t j = 0; j < w.width; j += kLanes) {
    const f32x16 xj = load(x + j);
    high = larger(high, xj);
    low = larger(low, set1(0.0f) - xj);
    poison = fma(xj, set1(0.0f), poison);
  }
  const float largest = reduce_max(larger(high, low));
  const float step = largest / most;
  const f32x16 inverse = set1(largest > 1e-30f && largest <= __FLT_MAX__ ? most / largest : 0.0f);
  i32x16 upper_sum = set1_i32(0), lower_sum = upper_sum;
  for (std::int32_t j = 0; j < w.width; j += kLanes) {
    const i32x16 code = to_nearest(load(x + j) * inverse);
    const i32x16 upper = over_256(code + set1_i32(128));
    store_low_bytes(w.digits_of(0, i, n) + j, over_256(upper + set1_i32(128)));
    store_low_bytes(w.digits_of(1, i, n) + j, upper);
    store_low_bytes(w.digits_of(2, i, n) + j, code);
    upper_sum = upper_sum + upper;
    lower_sum = lower_sum + (code - times_256(upper));
  }
  w.query_scales[i] = step * scale + reduce_add(poison);
  w.biases[2 * i] = sum_lanes(upper_sum) * kv::kCodeZero;
  w.biases[2 * i + 1] = sum_lanes(lower_sum) * kv::kCodeZero;
}

void prepare_queries(const QueryArgs& a, float* memory) {
  const std::int32_t n = a.n_tokens * a.group;
  const Workspace w(memory, a.head_dim, n);
  for (std::int32_t i = 0; i < n; ++i) {
    const float* q =
        a.q + (i / a.group) * a.token_stride + static_cast<std::int64_t>(i % a.group) * a.head_dim;
    if (a.keys == KvFormat::Int8) {
      quantize_query(q, a.head_dim, a.scale, w, i, n);
    } else {
      std::memcpy(w.queries + i * w.width, q, static_cast<std::size_t>(a.head_dim) * sizeof(float));
      w.query_scales[i] = a.scale;
    }
  }
}

// Rows that lie one behind the other, or anywhere.
struct Strided {
  const std::uint8_t* first;
  std::int64_t bytes;
  const std::uint8_t* operator()(std::int64_t i) const { return first + i * bytes; }
  Strided from(std::int64_t i) const { return {first + i * bytes, bytes}; }
};
struct Listed {
  const std::uint8_t* const* rows;
  const std::uint8_t* operator()(std::int64_t i) const { return rows[i]; }
  Listed from(std::int64_t i) const { return {rows + i}; }
};

// The slots of a tile's positions. Those that no query sees borrow a slot that one does.
struct Slots {
  bool consecutive;
  std::int64_t of[kTile];  // only of[0] where they are consecutive
  Slots(const SpanArgs& a, std::int32_t tile) {
    const std::int64_t shift = a.slot - a.all.begin, wrapped = a.wrapped - a.wrap;
    const std::int32_t begin = tile * kTile, end = begin + kTile;
    consecutive = begin >= a.all.begin && end <= a.all.end && (a.wrap <= begin || a.wrap >= end);
    for (std::int32_t t = 0; t < (consecutive ? 1 : kTile); ++t) {
      std::int32_t p = begin + t;
      p = p < a.all.begin ? a.all.begin : p;
      p = p >= a.all.end ? a.all.end - 1 : p;
      of[t] = p + (p < a.wrap ? shift : wrapped);
    }
  }
  // f(the tile's rows), each of so many bytes.
  template <class F>
  void rows(const std::uint8_t* data, std::int64_t bytes, F f) const {
    if (consecutive) return f(Strided{data + of[0] * bytes, bytes});
    const std::uint8_t* list[kTile];
    for (int t = 0; t < kTile; ++t) list[t] = data + of[t] * bytes;
    f(Listed{list});
  }
};

// Scales of a tile's rows.
void load_scales(const kv::Rows& rows, const Slots& slots, float (&scales)[kTile]) {
  for (int t = 0; t < kTile; t += slots.consecutive ? kLanes : 1) {
    if (slots.consecutive) {
      store(scales + t, load_f16(rows.scales + 2 * (slots.of[0] + t)));
    } else {
      scales[t] = blocks::f16_at(rows.scales + 2 * slots.of[t]);
    }
  }
}

constexpr std::int32_t kTilesAhead = 2;

// Asks the second-level cache for a tile's rows, of which a single query makes so little use that memory
// would be waited for. Rows behind the plane are never looked at.
void fetch_tile(const SpanArgs& a, const kv::Rows& rows, std::int32_t tile) {
  const std::int64_t bytes = a.head_dim * static_cast<std::int64_t>(element_bytes(rows.format));
  const std::int32_t p = tile * kTile > a.all.begin ? tile * kTile : a.all.begin;
  const std::int64_t slot = p + (p < a.wrap || p >= a.all.end ? a.slot - a.all.begin : a.wrapped - a.wrap);
  const auto first = reinterpret_cast<std::uintptr_t>(rows.data) + static_cast<std::uintptr_t>(slot * bytes);
  for (std::uintptr_t at = 0; at < static_cast<std::uintptr_t>(kTile * bytes); at += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(first + at), 0, 2);
  }
}

// Columns of N rows from byte `at` on, padded with zeros.
template <int N>
struct Padded {
  std::uint8_t bytes[N][64] = {};
  template <class Rows>
  Padded(Rows row, std::int64_t at, std::int64_t n) {
    for (int i = 0; i < N; ++i) std::memcpy(bytes[i], row(i) + at, static_cast<std::size_t>(n));
  }
  Strided rows() const { return {bytes[0], 64}; }
};

// Elements of a stored or staged row as float32.
struct ElementF32 {
  static constexpr int kBytes = 4;
  static f32x16 at(const std::uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
};
struct ElementF16 {
  static constexpr int kBytes = 2;
  static f32x16 at(const std::uint8_t* p) { return load_f16(p); }
};

// The vectors of a tile that anyone sees.
Range seen_vectors(Range seen, std::int32_t tile) {
  const std::int32_t begin = seen.begin - tile * kTile, end = seen.end - tile * kTile;
  return {(begin > 0 ? begin : 0) / kLanes, ((end < kTile ? end : kTile) + kLanes - 1) / kLanes};
}

// Keys of 32-bit elements (INT8: four codes) to staged [elements][kTile].
template <class Rows>
void stage_keys_32(Rows rows, Range vectors, std::int64_t row_bytes, float* staged) {
  auto* out = reinterpret_cast<std::uint32_t*>(staged);
  for (int v = vectors.begin; v < vectors.end; ++v) {
    const Rows sixteen = rows.from(v * kLanes);
    std::int64_t at = 0;
    for (; at + 64 <= row_bytes; at += 64) {
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
void stage_keys_16(Rows rows, Range vectors, std::int64_t row_bytes, float* staged) {
  auto* out = reinterpret_cast<std::uint16_t*>(staged);
  for (int v = vectors.begin / 2 * 2; v < vectors.end; v += 2) {
    const Rows thirty_two = rows.from(v * kLanes);
    std::int64_t at = 0;
    for (; at + 32 <= row_bytes; at += 32) {
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
void stage_keys_16(Rows rows, Range vectors, std::int64_t row_bytes, float* staged) {
  auto* out = reinterpret_cast<std::uint32_t*>(staged);
  for (int v = vectors.begin; v < vectors.end; ++v) {
    for (std::int64_t at = 0; at < row_bytes; at += 32) {
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

// What two queries see, together.
Range both(Range a, Range b) {
  if (a.begin >= a.end) return b;
  if (b.begin >= b.end) return a;
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}
template <int R>
Range seen_by(const Range* seen) {
  Range all = seen[0];
  for (int r = 1; r < R; ++r) all = both(all, seen[r]);
  return all;
}
Range cut(Range r, std::int32_t tile) {
  const std::int32_t begin = tile * kTile, end = begin + kTile;
  return {r.begin < begin ? begin : r.begin, r.end > end ? end : r.end};
}

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
void score_tile(const SpanArgs& a, const Workspace& w, std::int32_t tile) {
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
    slots.rows(a.k.data, row_bytes, [&](auto rows) { stage_keys_32(rows, vectors, row_bytes, w.staged); });
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
    slots.rows(a.k.data, row_bytes, [&](auto rows) { stage_keys_32(rows, vectors, row_bytes, w.staged); });
  } else {
    slots.rows(a.k.data, row_bytes, [&](auto rows) { stage_keys_16(rows, vectors, row_bytes, w.staged); });
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

// Scores to weights e^(score - largest), zero where the query sees nothing. A NaN score makes the total NaN.
Partial softmax(float* scores, Range seen, Range filled) {
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
                  float* sums, std::int64_t width) {
  f32x16 acc[R][D];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < D; ++j) acc[r][j] = load(sums + r * width + j * kLanes);
  }
  for (std::int32_t t = 0; t < n; ++t, row += stride) {
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
                const float* weights, float* sums, std::int64_t width) {
  std::int32_t v = 0;
  for (; v + kElementVectors <= vectors; v += kElementVectors) {
    weigh_floats<kElementVectors, R, Element>(row + v * kLanes * Element::kBytes, stride, n, weights,
                                              sums + v * kLanes, width);
  }
  for (; v < vectors; ++v) {
    weigh_floats<1, R, Element>(row + v * kLanes * Element::kBytes, stride, n, weights, sums + v * kLanes,
                                width);
  }
}

template <class Element>
void weigh_stored(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums) {
  const std::int64_t stride = a.head_dim * static_cast<std::int64_t>(Element::kBytes);
  in_blocks(a.n, [&](auto count, std::int32_t first) {
    const Range seen = cut(seen_by<count.value>(a.seen + first), tile);
    const auto run = [&](std::int32_t begin, std::int32_t end, std::int64_t shift) {
      if (begin >= end) return;
      weigh_rows<count.value, Element>(
          a.v.data + (begin + shift) * stride, stride, end - begin, a.head_dim / kLanes,
          w.scores + static_cast<std::int64_t>(first) * kSpan + begin, sums + first * w.width, w.width);
    };
    run(seen.begin, seen.end < a.wrap ? seen.end : a.wrap, a.slot - a.all.begin);
    run(seen.begin > a.wrap ? seen.begin : a.wrap, seen.end, a.wrapped - a.wrap);
  });
}

// Through a copy as float32: rows that are no whole vectors, or many queries that read each.
template <class Element>
void weigh_staged(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums) {
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
                                        sums + first * w.width, w.width);
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
    const i32x16 code = to_nearest(scaled[v] * inverse), upper = over_256(code);
    store_low_bytes(digits + v * kLanes, over_256(upper));
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

void weigh_int8(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums) {
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

void weigh_tile(const SpanArgs& a, const Workspace& w, std::int32_t tile, float* sums) {
  switch (a.v.format) {
    case KvFormat::F32:
      return a.head_dim % kLanes == 0 ? weigh_stored<ElementF32>(a, w, tile, sums)
                                      : weigh_staged<ElementF32>(a, w, tile, sums);
    case KvFormat::F16:
      return a.head_dim % kLanes == 0 && a.n <= kBlock ? weigh_stored<ElementF16>(a, w, tile, sums)
                                                       : weigh_staged<ElementF16>(a, w, tile, sums);
    case KvFormat::Int8:
      return weigh_int8(a, w, tile, sums);
  }
}

void attend_span(const SpanArgs& a, float* memory, Partial* parts, float* sums) {
  const Workspace w(memory, a.head_dim, a.n);
  const std::int32_t begin = a.all.begin / kTile, end = (a.all.end + kTile - 1) / kTile;
#if defined(__AMX_INT8__)
  if (a.k.format == KvFormat::Int8 || a.v.format == KvFormat::Int8) DigitTiles(a.n).configure();
#endif
  for (std::int32_t tile = begin; tile < end; ++tile) {
    if (a.n <= kBlock) {
      fetch_tile(a, a.k, tile + kTilesAhead);
      fetch_tile(a, a.v, tile);
    }
    score_tile(a, w, tile);
  }
  const Range filled{begin * kTile, end * kTile};
  for (std::int32_t i = 0; i < a.n; ++i) {
    parts[i] = softmax(w.scores + static_cast<std::int64_t>(i) * kSpan, a.seen[i], filled);
  }
  std::memset(sums, 0, static_cast<std::size_t>(a.n * w.width) * sizeof(float));
  for (std::int32_t tile = begin; tile < end; ++tile) weigh_tile(a, w, tile, sums);
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

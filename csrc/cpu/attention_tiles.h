// What scores and values share: a thread's workspace, queries as they are multiplied, and the rows of a tile.
#pragma once

#include "cpu/attention_simd.h"
#include "cpu/kernels.h"
#include "gguf/blocks.h"
#include "kv/row.h"

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
    const i32x16 upper = over_power<8>(code + set1_i32(128));
    store_low_bytes(w.digits_of(0, i, n) + j, over_power<8>(upper + set1_i32(128)));
    store_low_bytes(w.digits_of(1, i, n) + j, upper);
    store_low_bytes(w.digits_of(2, i, n) + j, code);
    upper_sum = upper_sum + upper;
    lower_sum = lower_sum + (code - times_256(upper));
  }
  w.query_scales[i] = step * scale + reduce_add(poison);
  // Of NaN the codes are anything, and so are their sums.
  const auto times_zero = [](std::int32_t sum) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(sum) * std::uint32_t{kv::kCodeZero});
  };
  w.biases[2 * i] = times_zero(sum_lanes(upper_sum));
  w.biases[2 * i + 1] = times_zero(sum_lanes(lower_sum));
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

// Rows that the second-level cache is asked for, a few lines at a time between the work on other rows: one
// query makes so little use of a row that memory would be waited for, and so many requests at once would wait
// for each other. Straight on, past a wrap of the ring or the end of the plane if it comes to that: asking
// never faults.
struct Ahead {
  std::uintptr_t at;  // 0: nothing is asked for

  explicit Ahead(const std::uint8_t* first) : at(reinterpret_cast<std::uintptr_t>(first)) {}

  // While as many bytes of the other rows are worked on.
  void fetch(std::int64_t bytes) {
    if (at == 0) return;
    const std::uintptr_t end = at + static_cast<std::uintptr_t>(bytes);
    for (; at < end; at += 64) __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
  }
};

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

}  // namespace
}  // namespace ringlm::cpu

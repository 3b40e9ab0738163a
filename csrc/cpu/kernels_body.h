// The bodies of the kernels, written once on simd.h. Each kernels_<isa>.cpp includes this file with its own
// compiler flags, so nothing in here may have external linkage or call a function that has and is defined
// in a header: the linker would keep one copy of it, perhaps the one that this processor cannot run.
#pragma once

#include "cpu/kernels.h"
#include "cpu/matmul_body.h"
#include "cpu/row_matmul_body.h"
#include "cpu/simd.h"
#include "gguf/blocks.h"
#include "kv/row.h"

namespace ringlm::cpu {
namespace {

float dot(const float* a, const float* b, std::int32_t n) {
  f32x16 acc = set1(0.0f);
  const std::int32_t whole = n / kLanes * kLanes;
  for (std::int32_t i = 0; i < whole; i += kLanes) acc = fma(load(a + i), load(b + i), acc);
  float sum = reduce_add(acc);
  for (std::int32_t i = whole; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void rms_norm(const float* x, const float* w, float eps, float* y, std::int32_t n) {
  const float mean_square = dot(x, x, n) / static_cast<float>(n);
  // Squares that overflow would turn every element into zero; NaN is noticed.
  const float scale =
      mean_square <= __FLT_MAX__ ? 1.0f / __builtin_sqrtf(mean_square + eps) : __builtin_nanf("");
  for (std::int32_t i = 0; i < n; ++i) y[i] = w[i] * (x[i] * scale);
}

// f applied to 16 elements at a time; the tail goes through a padded copy, so it is computed alike.
template <class F>
void map(float* a, const float* b, std::int64_t n, F f) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(a + i, f(load(a + i), load(b + i)));
  if (i == n) return;
  float ta[kLanes] = {}, tb[kLanes] = {};
  const auto bytes = static_cast<std::size_t>(n - i) * sizeof(float);
  std::memcpy(ta, a + i, bytes);
  std::memcpy(tb, b + i, bytes);
  store(ta, f(load(ta), load(tb)));
  std::memcpy(a + i, ta, bytes);
}

void silu_mul(float* gate, const float* up, std::int64_t n) {
  map(gate, up, n, [](f32x16 g, f32x16 u) { return g / (set1(1.0f) + exp(set1(0.0f) - g)) * u; });
}

// Sylvester's matrix of order `width`, a multiple of kLanes, on x: its lower index bits by a product with the
// matrix of order kLanes, its upper ones by sums and differences of whole vectors. The result times `scale`.
void walsh_hadamard(const float* sylvester, float* x, std::int32_t width, float scale) {
  for (std::int32_t i = 0; i < width; i += kLanes) {
    f32x16 sum = set1(0.0f);
    for (int j = 0; j < kLanes; ++j) sum = fma(set1(x[i + j]), load(sylvester + j * kLanes), sum);
    store(x + i, sum * set1(scale));
  }
  for (std::int32_t half = kLanes; half < width; half *= 2) {
    for (std::int32_t at = 0; at < width; at += 2 * half) {
      for (std::int32_t i = at; i < at + half; i += kLanes) {
        const f32x16 a = load(x + i), b = load(x + i + half);
        store(x + i, a + b);
        store(x + i + half, a - b);
      }
    }
  }
}

// y [n] = matrix times x, for a matrix whose columns lie one behind the other and n a multiple of kLanes.
void times_matrix(const float* columns, const float* x, float* y, std::int32_t n) {
  for (std::int32_t i = 0; i < n; i += kLanes) {
    f32x16 sum = set1(0.0f);
    for (std::int32_t j = 0; j < n; ++j) sum = fma(load(columns + j * n + i), set1(x[j]), sum);
    store(y + i, sum);
  }
}

void rotate(const kv::Rotation& r, const float* tables, float* x, bool back) {
  const std::int32_t block = r.m * r.width;
  const bool dense = is_dense(r);
  if (!dense && (r.m != 1 || r.width % kLanes != 0)) return back ? kv::rotate_back(r, x) : kv::rotate(r, x);
  const std::int32_t d = r.head_dim;
  const auto flip = [&] {
    for (std::int32_t i = 0; i < d; i += kLanes) store(x + i, load(x + i) * load(tables + i));
  };
  if (!back) flip();
  for (std::int32_t at = 0; at < d; at += block) {
    if (dense) {
      float y[kMostDense];
      times_matrix(tables + d + kLanes * kLanes + (back ? block * block : 0), x + at, y, block);
      std::memcpy(x + at, y, static_cast<std::size_t>(block) * sizeof(float));
    } else {
      walsh_hadamard(tables + d, x + at, block, 1.0f / __builtin_sqrtf(static_cast<float>(block)));
    }
  }
  if (back) flip();
}

void store_row(const kv::Rows& rows, std::int64_t slot, const float* src, std::int32_t n) {
  const std::int64_t at = slot * n;
  switch (rows.format) {
    case KvFormat::F32:
      std::memcpy(rows.data + 4 * at, src, static_cast<std::size_t>(n) * sizeof(float));
      return;
    case KvFormat::F16:
      return f32_to_f16_row(src, rows.data + 2 * at, n);
    case KvFormat::Int8:
      return kv::store_int8(src, rows.data + at, rows.scales + 2 * slot, n);
  }
}

// Elements of a stored row as float32, an INT8 one without its scale.
struct RowF32 {
  static constexpr int kBytes = 4;
  static f32x16 at(const std::uint8_t* row, std::int32_t i) {
    return load(reinterpret_cast<const float*>(row) + i);
  }
  static float one(const std::uint8_t* row, std::int32_t i) { return reinterpret_cast<const float*>(row)[i]; }
  static float scale(const kv::Rows&, std::int64_t) { return 1.0f; }
};
struct RowF16 {
  static constexpr int kBytes = 2;
  static f32x16 at(const std::uint8_t* row, std::int32_t i) { return load_f16(row + 2 * i); }
  static float one(const std::uint8_t* row, std::int32_t i) { return blocks::f16_at(row + 2 * i); }
  static float scale(const kv::Rows&, std::int64_t) { return 1.0f; }
};
struct RowInt8 {
  static constexpr int kBytes = 1;
  static f32x16 at(const std::uint8_t* row, std::int32_t i) {
    return to_f32(load_u8(row + i)) - set1(static_cast<float>(kv::kCodeZero));
  }
  static float one(const std::uint8_t* row, std::int32_t i) {
    return static_cast<float>(row[i] - kv::kCodeZero);
  }
  static float scale(const kv::Rows& rows, std::int64_t slot) {
    return blocks::f16_at(rows.scales + 2 * slot);
  }
};

// f(row type) for a format.
template <class F>
void with_rows(KvFormat format, F f) {
  switch (format) {
    case KvFormat::F32:
      return f(RowF32{});
    case KvFormat::F16:
      return f(RowF16{});
    case KvFormat::Int8:
      return f(RowInt8{});
  }
}

struct Slots {
  std::int64_t of[kTile];
  explicit Slots(const TileArgs& a) {
    for (std::int32_t t = 0; t < a.n; ++t) of[t] = t < a.n_first ? a.slot + t : a.wrapped + (t - a.n_first);
  }
};

constexpr int kHeads = 4;  // query heads that share a row while it is in registers

// scores [H][kTile] of H heads: each key is read and widened once for all of them.
template <int H, class Row>
void score_rows(const TileArgs& a, const Slots& slots, const float* q, const float* offsets, Row,
                float (&scores)[kHeads][kTile]) {
  const std::int32_t d = a.head_dim, whole = d / kLanes * kLanes;
  for (std::int32_t t = 0; t < a.n; ++t) {
    const std::uint8_t* row = a.k.data + slots.of[t] * d * Row::kBytes;
    f32x16 acc[H];
    for (int h = 0; h < H; ++h) acc[h] = set1(0.0f);
    for (std::int32_t i = 0; i < whole; i += kLanes) {
      const f32x16 k = Row::at(row, i);
      for (int h = 0; h < H; ++h) acc[h] = fma(load(q + h * d + i), k, acc[h]);
    }
    const float step = Row::scale(a.k, slots.of[t]);
    for (int h = 0; h < H; ++h) {
      float sum = reduce_add(acc[h]);
      for (std::int32_t i = whole; i < d; ++i) sum += q[h * d + i] * Row::one(row, i);
      sum *= step;
      if (offsets) sum += offsets[h * a.offset_stride];
      scores[h][t] = sum * a.scale;
    }
  }
}

// sums [H, head_dim] = weights [H][kTile] times the values.
template <int H, class Row>
void weigh_rows(const TileArgs& a, const Slots& slots, const float (&weights)[kHeads][kTile], Row,
                float* sums) {
  const std::int32_t d = a.head_dim, whole = d / kLanes * kLanes;
  float stepped[H][kTile];
  for (std::int32_t t = 0; t < a.n; ++t) {
    const float step = Row::scale(a.v, slots.of[t]);
    for (int h = 0; h < H; ++h) stepped[h][t] = weights[h][t] * step;
  }
  for (std::int32_t i = 0; i < whole; i += kLanes) {
    f32x16 acc[H];
    for (int h = 0; h < H; ++h) acc[h] = set1(0.0f);
    for (std::int32_t t = 0; t < a.n; ++t) {
      const f32x16 v = Row::at(a.v.data + slots.of[t] * d * Row::kBytes, i);
      for (int h = 0; h < H; ++h) acc[h] = fma(set1(stepped[h][t]), v, acc[h]);
    }
    for (int h = 0; h < H; ++h) store(sums + h * d + i, acc[h]);
  }
  for (std::int32_t i = whole; i < d; ++i) {
    for (int h = 0; h < H; ++h) {
      float sum = 0.0f;
      for (std::int32_t t = 0; t < a.n; ++t) {
        sum += stepped[h][t] * Row::one(a.v.data + slots.of[t] * d * Row::kBytes, i);
      }
      sums[h * d + i] = sum;
    }
  }
}

// A NaN score must reach the result: comparisons are written so that NaN wins.
template <int H>
void attend_heads(const TileArgs& a, const Slots& slots, std::int32_t first, Partial* parts, float* sums) {
  float scores[kHeads][kTile];
  const float* q = a.q + static_cast<std::int64_t>(first) * a.head_dim;
  const float* offsets = a.offsets ? a.offsets + static_cast<std::int64_t>(first) * a.offset_stride : nullptr;
  with_rows(a.k.format, [&](auto row) { score_rows<H>(a, slots, q, offsets, row, scores); });
  for (int h = 0; h < H; ++h) {
    float* s = scores[h];
    float largest = -__builtin_inff();
    for (std::int32_t t = 0; t < a.n; ++t) {
      if (!(s[t] <= largest)) largest = s[t];
    }
    for (std::int32_t t = a.n; t < kTile; ++t) s[t] = largest;  // defined, and not used
    float total = 0.0f;
    for (std::int32_t t = 0; t < kTile; t += kLanes) store(s + t, exp(load(s + t) - set1(largest)));
    for (std::int32_t t = 0; t < a.n; ++t) total += s[t];
    parts[first + h] = {largest, total};
  }
  with_rows(a.v.format, [&](auto row) {
    weigh_rows<H>(a, slots, scores, row, sums + static_cast<std::int64_t>(first) * a.head_dim);
  });
}

// Each K and V row is read from memory once for all heads of the group.
void attend_tile(const TileArgs& a, Partial* parts, float* sums) {
  const Slots slots(a);
  std::int32_t h = 0;
  for (; h + kHeads <= a.group; h += kHeads) attend_heads<kHeads>(a, slots, h, parts, sums);
  switch (a.group - h) {
    case 1:
      return attend_heads<1>(a, slots, h, parts, sums);
    case 2:
      return attend_heads<2>(a, slots, h, parts, sums);
    case 3:
      return attend_heads<3>(a, slots, h, parts, sums);
  }
}

void merge(Partial& into, float* into_sum, const Partial& from, const float* from_sum,
           std::int32_t head_dim) {
  const float largest = from.largest <= into.largest ? into.largest : from.largest;
  float weights[kLanes] = {into.largest - largest, from.largest - largest};
  store(weights, exp(load(weights)));
  into.largest = largest;
  into.total = into.total * weights[0] + from.total * weights[1];
  for (std::int32_t i = 0; i < head_dim; ++i)
    into_sum[i] = into_sum[i] * weights[0] + from_sum[i] * weights[1];
}

void finish(const Partial& part, const float* sum, float* out, std::int32_t head_dim) {
  const float scale = 1.0f / part.total;
  for (std::int32_t i = 0; i < head_dim; ++i) out[i] = sum[i] * scale;
}

constexpr Kernels make_kernels(const char* name) {
  return {name,     dequantize_row, matmul,    quantize,    row_matmul, rms_norm,
          silu_mul, rotate,         store_row, attend_tile, merge,      finish};
}

}  // namespace
}  // namespace ringlm::cpu

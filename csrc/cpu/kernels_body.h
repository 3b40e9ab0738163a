// The bodies of the kernels, written once on simd.h. Each kernels_<isa>.cpp includes this file with its own
// compiler flags, so nothing in here may have external linkage or call a function that has and is defined
// in a header: the linker would keep one copy of it, perhaps the one that this processor cannot run.
#pragma once

#include "cpu/attention_body.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "cpu/weights.h"
#include "gguf/blocks.h"
#include "kv/row.h"

namespace ringlm::cpu {
namespace {

void dequantize_row(gguf::DType type, const std::uint8_t* row, float* y, std::int32_t n) {
  const bool done = with_quantized(type, [=](auto weights) {
    for (std::int32_t i = 0; i < n / 32; ++i) {
      const f32x32 w = weights.at(row, i);
      store(y + 32 * i, w.lo);
      store(y + 32 * i + kLanes, w.hi);
    }
  });
  if (!done) blocks::row_function(type)(row, y, static_cast<std::size_t>(n));
}

// R rows times T tokens. Every output has one vector of partial sums, k ascending, then the lanes are folded
// and the tail is added: the same for every R and T.
template <int R, int T>
void block(const float* const (&w)[kRowTile], const float* x, std::int32_t cols, float (&out)[R][T]) {
  f32x16 acc[R][T];
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) acc[r][t] = set1(0.0f);
  }
  const std::int32_t whole = cols / kLanes * kLanes;
  for (std::int32_t k = 0; k < whole; k += kLanes) {
    f32x16 wk[R];
    for (int r = 0; r < R; ++r) wk[r] = load(w[r] + k);
    for (int t = 0; t < T; ++t) {
      const f32x16 xk = load(x + static_cast<std::int64_t>(t) * cols + k);
      for (int r = 0; r < R; ++r) acc[r][t] = fma(wk[r], xk, acc[r][t]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) {
      float sum = reduce_add(acc[r][t]);
      for (std::int32_t k = whole; k < cols; ++k) sum += w[r][k] * x[static_cast<std::int64_t>(t) * cols + k];
      out[r][t] = sum;
    }
  }
}

void write(const MatmulArgs& a, std::int32_t row, std::int32_t token, float sum) {
  float& y = a.into ? a.into[token][row] : a.y[static_cast<std::int64_t>(token) * a.rows + row];
  const float value = a.bias ? sum + a.bias[row] : sum;
  y = a.add ? y + value : value;
}

template <int R, int T>
void block_into(const MatmulArgs& a, const float* const (&w)[kRowTile], std::int32_t row,
                std::int32_t token) {
  float out[R][T];
  block<R, T>(w, a.x + static_cast<std::int64_t>(token) * a.cols, a.cols, out);
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < R; ++r) write(a, row + r, token + t, out[r][t]);
  }
}

template <int R>
void rows_into(const MatmulArgs& a, std::int32_t row, float* scratch) {
  const float* w[kRowTile] = {};
  for (int r = 0; r < R; ++r) {
    const std::uint8_t* src = a.weights + static_cast<std::size_t>(row + r) * a.row_bytes;
    float* dst = scratch + static_cast<std::size_t>(r) * static_cast<std::size_t>(a.cols);
    dequantize_row(a.type, src, dst, a.cols);
    w[r] = dst;
  }
  std::int32_t t = 0;
  for (; t + 4 <= a.n_tokens; t += 4) block_into<R, 4>(a, w, row, t);
  for (; t < a.n_tokens; ++t) block_into<R, 1>(a, w, row, t);
}

// R quantized rows times one token, without a detour over memory.
template <int R, class W>
void one_token(const MatmulArgs& a, W weights, std::int32_t row) {
  f32x16 acc[R];
  const std::uint8_t* w[R];
  for (int r = 0; r < R; ++r) {
    acc[r] = set1(0.0f);
    w[r] = a.weights + static_cast<std::size_t>(row + r) * a.row_bytes;
  }
  for (std::int32_t i = 0; i < a.cols / 32; ++i) {
    const f32x16 lo = load(a.x + 32 * i), hi = load(a.x + 32 * i + kLanes);
    for (int r = 0; r < R; ++r) {
      const f32x32 wi = weights.at(w[r], i);
      acc[r] = fma(wi.hi, hi, fma(wi.lo, lo, acc[r]));
    }
  }
  for (int r = 0; r < R; ++r) write(a, row + r, 0, reduce_add(acc[r]));
}

void matmul(const MatmulArgs& a, std::int32_t begin, std::int32_t end, float* scratch) {
  std::int32_t row = begin;
  const bool done = a.n_tokens == 1 && with_quantized(a.type, [&](auto weights) {
                      for (; row + kRowTile <= end; row += kRowTile) one_token<kRowTile>(a, weights, row);
                      for (; row < end; ++row) one_token<1>(a, weights, row);
                    });
  if (done) return;
  for (; row + kRowTile <= end; row += kRowTile) rows_into<kRowTile>(a, row, scratch);
  for (; row < end; ++row) rows_into<1>(a, row, scratch);
}

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

constexpr Kernels make_kernels(const char* name) {
  return {name,      dequantize_row,  matmul,      rms_norm, silu_mul, rotate,
          store_row, prepare_queries, attend_span, merge,    finish};
}

}  // namespace
}  // namespace ringlm::cpu

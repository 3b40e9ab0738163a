// Products with weights as they lie in the file, for models that are opened without packing: rows are turned
// into float32 on the way, and activations stay float32.
#pragma once

#include "cpu/kernels.h"
#include "cpu/weights.h"

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
  float& y = a.into ? a.into[token][row] : a.y[static_cast<std::int64_t>(token) * a.w.rows + row];
  const float value = a.bias ? sum + a.bias[row] : sum;
  y = a.add ? y + value : value;
}

template <int R, int T>
void block_into(const MatmulArgs& a, const float* const (&w)[kRowTile], std::int32_t row,
                std::int32_t token) {
  float out[R][T];
  block<R, T>(w, a.x + static_cast<std::int64_t>(token) * a.w.cols, a.w.cols, out);
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < R; ++r) write(a, row + r, token + t, out[r][t]);
  }
}

template <int R>
void rows_into(const MatmulArgs& a, std::int32_t row, float* scratch) {
  const float* w[kRowTile] = {};
  for (int r = 0; r < R; ++r) {
    const std::uint8_t* src = a.w.data + static_cast<std::size_t>(row + r) * a.w.row_bytes;
    float* dst = scratch + static_cast<std::size_t>(r) * static_cast<std::size_t>(a.w.cols);
    dequantize_row(a.w.type, src, dst, a.w.cols);
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
    w[r] = a.w.data + static_cast<std::size_t>(row + r) * a.w.row_bytes;
  }
  for (std::int32_t i = 0; i < a.w.cols / 32; ++i) {
    const f32x16 lo = load(a.x + 32 * i), hi = load(a.x + 32 * i + kLanes);
    for (int r = 0; r < R; ++r) {
      const f32x32 wi = weights.at(w[r], i);
      acc[r] = fma(wi.hi, hi, fma(wi.lo, lo, acc[r]));
    }
  }
  for (int r = 0; r < R; ++r) write(a, row + r, 0, reduce_add(acc[r]));
}

void row_matmul(const MatmulArgs& a, std::int32_t begin, std::int32_t end, float* scratch) {
  std::int32_t row = begin;
  const bool done = a.n_tokens == 1 && with_quantized(a.w.type, [&](auto weights) {
                      for (; row + kRowTile <= end; row += kRowTile) one_token<kRowTile>(a, weights, row);
                      for (; row < end; ++row) one_token<1>(a, weights, row);
                    });
  if (done) return;
  for (; row + kRowTile <= end; row += kRowTile) rows_into<kRowTile>(a, row, scratch);
  for (; row < end; ++row) rows_into<1>(a, row, scratch);
}

}  // namespace
}  // namespace ringlm::cpu

// The bodies of the kernels, written once on simd.h. Each kernels_<isa>.cpp includes this file with its own
// compiler flags, so nothing in here may have external linkage or call a function that has and is defined
// in a header: the linker would keep one copy of it, perhaps the one that this processor cannot run.
#pragma once

#include "cpu/attention_body.h"
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

// x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), and (1 + tanh u) / 2 = 1 / (1 + e^(-2 u)).
void gelu_mul(float* gate, const float* up, std::int64_t n) {
  map(gate, up, n, [](f32x16 g, f32x16 u) {
    const f32x16 inner = g * fma(g * g, set1(-2.0f * 0.7978845608f * 0.044715f), set1(-2.0f * 0.7978845608f));
    return g / (set1(1.0f) + exp(inner)) * u;
  });
}

void soft_cap(float* x, std::int64_t n, float scale, float cap) {
  if (cap == 0.0f) {
    for (std::int64_t i = 0; i < n; ++i) x[i] *= scale;
    return;
  }
  map(x, x, n, [=](f32x16 a, f32x16) { return soft_capped(a * set1(scale), cap); });
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

// A kernel clears the upper halves of the vector registers when it ends, or all SSE code after it, which is
// the rest of the library, waits for them. GCC 12 forgets that behind calls that pass vectors.
template <auto f>
struct Entry;
template <class... Args, void (*f)(Args...)>
struct Entry<f> {
  static void call(Args... args) {
    f(args...);
#if defined(__AVX__)
    _mm256_zeroupper();
#endif
  }
};

constexpr Kernels make_kernels(const char* name) {
  return {name,
          Entry<dequantize_row>::call,
          Entry<matmul>::call,
          Entry<quantize>::call,
          Entry<row_matmul>::call,
          Entry<rms_norm>::call,
          Entry<silu_mul>::call,
          Entry<gelu_mul>::call,
          Entry<soft_cap>::call,
          Entry<rotate>::call,
          Entry<store_row>::call,
          Entry<prepare_queries>::call,
          Entry<attend_span>::call,
          Entry<merge>::call,
          Entry<finish>::call};
}

}  // namespace
}  // namespace ringlm::cpu

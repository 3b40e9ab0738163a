// Products of packed weights and activations: floor: every packed byte once a step (M = 1), or once for
// kTokens tokens out of the caches.
//
// The order of every sum is the same for one token and for many: blocks of 32 columns ascending, each an
// exact integer sum that is scaled and added in float32. A lane is a row, so nothing is summed across lanes.
#pragma once

#include "cpu/pack.h"
#include "cpu/packed_types.h"

namespace ringlm::cpu {
namespace {

// Tokens whose sums fit into the registers.
#if defined(__AVX512F__)
constexpr int kTokens = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTokens = 2;
#else
constexpr int kTokens = 1;
#endif

void quantize(const float* x, ActBlock* y, std::int32_t n) {
  for (std::int32_t i = 0; i < n; i += kActBlock, ++y) {
    const f32x16 a = load(x + i), b = load(x + i + kLanes);
    const float largest = from_bits(largest_bits(a, b));
    if (!(largest <= __FLT_MAX__)) {  // NaN or infinity: so is every product with this block
      *y = ActBlock{};
      y->scale = y->sum = y->half_sums[0] = y->half_sums[1] = __builtin_nanf("");
      continue;
    }
    // Below that the inverse would overflow; such a block is nothing beside any other.
    const bool none = largest < 1e-30f;
    const float scale = none ? 0.0f : largest * (1.0f / kActLargest);
    const f32x16 inverse = set1(none ? 0.0f : kActLargest / largest);
    const i32x16 qa = to_nearest(a * inverse), qb = to_nearest(b * inverse);
    store_digits(*y, qa, qb);
    y->scale = scale;
    y->totals[0] = sum_lanes(qa);
    y->totals[1] = sum_lanes(qb);
    y->half_sums[0] = scale * static_cast<float>(y->totals[0]);
    y->half_sums[1] = scale * static_cast<float>(y->totals[1]);
    y->sum = scale * static_cast<float>(y->totals[0] + y->totals[1]);
  }
}

// Calls f with the constants 0 to N - 1.
template <int I>
struct Constant {
  static constexpr int value = I;
};
template <int N, int I = 0, class F>
inline __attribute__((always_inline)) void unrolled(F f) {
  if constexpr (I < N) {
    f(Constant<I>{});
    unrolled<N, I + 1>(f);
  }
}

// Signed bytes hold the codes whose zero is 128 after that has been taken from them: the same sums.
template <class W>
constexpr bool kMinusZero = kSignedCodes && W::kZero == 128;

// The codes of kStep words from word At on, as the products take them.
template <class W, int G, int At>
inline __attribute__((always_inline)) Codes step_codes(const std::uint8_t* p) {
  if constexpr (kStep == 2) {
    return side_by_side(W::template codes<G, At>(p), W::template codes<G, At + 1>(p));
  } else if constexpr (kMinusZero<W>) {
    return W::template codes<G, At>(p) ^ set1_u32(0x80808080);
  } else {
    return W::template codes<G, At>(p);
  }
}

// Group G of 32 columns of the block at p, times the activations of T tokens, added to acc [T].
template <class W, int G, int T>
inline __attribute__((always_inline)) void add_columns(const std::uint8_t* p, const ActBlock* x,
                                                       std::int64_t stride, f32x16 (&acc)[T]) {
  constexpr int steps = 8 / W::kScales / kStep, zero = kMinusZero<W> ? 0 : W::kZero;
  unrolled<W::kScales>([&](auto s) {
    constexpr int S = decltype(s)::value;
    Sums sums[T];
    unrolled<T>([&](auto t) {
      const ActBlock& xt = x[t.value * stride];
      const std::int32_t all = W::kScales == 1 ? xt.totals[0] + xt.totals[1] : xt.totals[S];
      sums[t.value] = start(-zero * all);
    });
    unrolled<steps>([&](auto w) {
      constexpr int at = kStep * (steps * S + decltype(w)::value);
      const Codes codes = step_codes<W, G, at>(p);
      unrolled<T>([&](auto t) { accumulate<at>(sums[t.value], codes, x[t.value * stride]); });
    });
    const f32x16 d = W::template scale<G, S>(p);
    unrolled<T>([&](auto t) {
      const ActBlock& xt = x[t.value * stride];
      acc[t.value] = fma(d * set1(xt.scale), to_f32(total(sums[t.value])), acc[t.value]);
    });
    if constexpr (W::kMinima) {
      const f32x16 m = W::template minimum<G, S>(p);
      unrolled<T>([&](auto t) {
        const ActBlock& xt = x[t.value * stride];
        acc[t.value] = fma(m, set1(W::kScales == 1 ? xt.sum : xt.half_sums[S]), acc[t.value]);
      });
    }
  });
}

constexpr std::int32_t kAhead = 2048;  // bytes between what is read and what is asked for

// One group of rows times T tokens.
template <class W, int T>
void add_group(const std::uint8_t* p, std::int32_t cols, const ActBlock* x, std::int64_t stride,
               f32x16 (&acc)[T]) {
  constexpr int bytes = kGroup * W::kBytes, groups = W::kColumns / kActBlock;
  for (std::int32_t i = 0; i < cols; i += W::kColumns, p += bytes, x += groups) {
    if constexpr (T == 1) {
      for (int b = 0; b < bytes; b += 64) __builtin_prefetch(p + kAhead + b);
    }
    unrolled<groups>([&](auto g) { add_columns<W, g.value, T>(p, x + g.value, stride, acc); });
  }
}

// The outputs of a group's rows for one token, plus bias.
void write_group(const MatmulArgs& a, std::int32_t group, std::int32_t token, f32x16 sum) {
  const std::int32_t row = group * kGroup, n = a.w.rows - row;
  float* y = (a.into ? a.into[token] : a.y + static_cast<std::int64_t>(token) * a.w.rows) + row;
  if (n >= kGroup) {
    if (a.bias) sum = sum + load(a.bias + row);
    store(y, a.add ? load(y) + sum : sum);
    return;
  }
  float values[kGroup];
  store(values, sum);
  for (std::int32_t r = 0; r < n; ++r) {
    const float value = a.bias ? values[r] + a.bias[row + r] : values[r];
    y[r] = a.add ? y[r] + value : value;
  }
}

template <class W, int T>
void tokens_into(const MatmulArgs& a, std::int32_t begin, std::int32_t end, std::int32_t token) {
  const std::int64_t stride = a.w.cols / kActBlock;
  const ActBlock* x = a.quantized + token * stride;
  for (std::int32_t group = begin; group < end; ++group) {
    f32x16 acc[T];
    for (int t = 0; t < T; ++t) acc[t] = set1(0.0f);
    add_group<W, T>(a.w.data + static_cast<std::size_t>(group) * a.w.group_bytes(), a.w.cols, x, stride, acc);
    for (int t = 0; t < T; ++t) write_group(a, group, token + t, acc[t]);
  }
}

// Elements of a type without blocks.
struct PackedF32 {
  static constexpr int kBytes = 4;
  static f32x16 at(const std::uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
};
struct PackedF16 {
  static constexpr int kBytes = 2;
  static f32x16 at(const std::uint8_t* p) { return load_f16(p); }
};
struct PackedBF16 {
  static constexpr int kBytes = 2;
  static f32x16 at(const std::uint8_t* p) { return load_bf16(p); }
};

// R groups of rows times T tokens: several groups, so that one waits for its sum while others compute. Sums
// of 32 columns are made on their own: rounding errors grow with the length of a sum.
template <class W, int R, int T>
void float_groups(const MatmulArgs& a, std::int32_t group, std::int32_t token) {
  const std::int32_t cols = a.w.cols;
  const float* x = a.x + static_cast<std::int64_t>(token) * cols;
  const std::uint8_t* p[R];
  f32x16 acc[R][T];
  unrolled<R>([&](auto r) {
    p[r.value] = a.w.data + static_cast<std::size_t>(group + r.value) * a.w.group_bytes();
    unrolled<T>([&](auto t) { acc[r.value][t.value] = set1(0.0f); });
  });
  for (std::int32_t first = 0; first < cols; first += kActBlock) {
    const std::int32_t end = first + kActBlock < cols ? first + kActBlock : cols;
    f32x16 part[R][T];
    unrolled<R>([&](auto r) { unrolled<T>([&](auto t) { part[r.value][t.value] = set1(0.0f); }); });
    for (std::int32_t k = first; k < end; ++k) {
      unrolled<R>([&](auto r) {
        const f32x16 w = W::at(p[r.value] + static_cast<std::size_t>(k) * (kGroup * W::kBytes));
        unrolled<T>([&](auto t) {
          part[r.value][t.value] = fma(w, set1(x[t.value * cols + k]), part[r.value][t.value]);
        });
      });
    }
    unrolled<R>([&](auto r) {
      if constexpr (T == 1) {
        const std::uint8_t* next = p[r.value] + static_cast<std::size_t>(end) * (kGroup * W::kBytes);
        for (int b = 0; b < kActBlock * kGroup * W::kBytes; b += 64) __builtin_prefetch(next + b);
      }
      unrolled<T>([&](auto t) { acc[r.value][t.value] = acc[r.value][t.value] + part[r.value][t.value]; });
    });
  }
  unrolled<R>([&](auto r) {
    unrolled<T>([&](auto t) { write_group(a, group + r.value, token + t.value, acc[r.value][t.value]); });
  });
}

template <class W>
void float_matmul(const MatmulArgs& a, std::int32_t begin, std::int32_t end) {
  std::int32_t token = 0;
  if constexpr (kTokens > 1) {
    for (; token + kTokens <= a.n_tokens; token += kTokens) {
      for (std::int32_t group = begin; group < end; ++group) float_groups<W, 1, kTokens>(a, group, token);
    }
  }
  for (; token < a.n_tokens; ++token) {
    std::int32_t group = begin;
    for (; group + 4 <= end; group += 4) float_groups<W, 4, 1>(a, group, token);
    for (; group < end; ++group) float_groups<W, 1, 1>(a, group, token);
  }
}

}  // namespace
}  // namespace ringlm::cpu

#if defined(__AMX_INT8__)
#include "cpu/matmul_amx.h"
#endif

namespace ringlm::cpu {
namespace {

template <class W>
void quantized_matmul(const MatmulArgs& a, std::int32_t begin, std::int32_t end) {
  std::int32_t token = 0;
#if defined(__AMX_INT8__)
  token = amx_tokens<W>(a, begin, end);
#endif
  if constexpr (kTokens > 1) {
    for (; token + kTokens <= a.n_tokens; token += kTokens) tokens_into<W, kTokens>(a, begin, end, token);
  }
  for (; token < a.n_tokens; ++token) tokens_into<W, 1>(a, begin, end, token);
}

void matmul(const MatmulArgs& a, std::int32_t begin, std::int32_t end) {
  if (with_packed(a.w.type, [&](auto w) { quantized_matmul<decltype(w)>(a, begin, end); })) return;
  switch (a.w.type) {
    case gguf::DType::F32:
      return float_matmul<PackedF32>(a, begin, end);
    case gguf::DType::F16:
      return float_matmul<PackedF16>(a, begin, end);
    default:
      return float_matmul<PackedBF16>(a, begin, end);
  }
}

}  // namespace
}  // namespace ringlm::cpu

// Products of packed weights and activations. Byte floor: every packed byte once a step, whether it has one
// token or many.
//
// The order of every sum is the same for one token and for many: blocks of 32 columns ascending, each an
// exact integer sum that is scaled and added in float32. A lane is a row, so nothing is summed across lanes.
#pragma once

#include <type_traits>

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

// Fewest tokens for which it pays to take a group of rows apart.
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__aarch64__)
constexpr std::int32_t kStageFrom = 4;
#else
constexpr std::int32_t kStageFrom = INT32_MAX;
#endif

// 32 columns of a tile of tokens. Byte may be const.
template <class Byte>
struct TileAt {
  template <class T>
  using As = std::conditional_t<std::is_const_v<Byte>, const T, T>;
  Byte* at;
  std::int32_t tokens;  // of the tile

  As<ActDigits>* digits() const { return reinterpret_cast<As<ActDigits>*>(at); }
  As<ActSums>* sums() const { return reinterpret_cast<As<ActSums>*>(digits() + tokens); }
  TileAt block(std::int64_t n) const { return {at + n * tokens * std::int64_t{kActBytes}, tokens}; }
};
using Tile = TileAt<const std::byte>;

// The tile that a token is in, from its first column on.
template <class Byte>
inline TileAt<Byte> tile_of(Byte* quantized, std::int32_t cols, std::int64_t token, std::int64_t n_tokens) {
  const std::int32_t tokens = act_tile(n_tokens);
  return TileAt<Byte>{quantized, tokens}.block(token / tokens * (cols / kActBlock));
}

void quantize(const float* x, std::int32_t n, std::byte* y, std::int64_t token, std::int64_t n_tokens) {
  TileAt<std::byte> tile = tile_of(y, n, token, n_tokens);
  const std::int64_t place = token % tile.tokens;
  for (std::int32_t i = 0; i < n; i += kActBlock, tile = tile.block(1)) {
    ActDigits& digits = tile.digits()[place];
    ActSums& sums = tile.sums()[place];
    // The sums of the tokens that fill the last tile up are zero, so that their digits come to nothing,
    // whatever they are: scales that happen to lie there could be subnormal, and slow.
    const std::int64_t end = token + 1 == n_tokens ? tile.tokens : 0;
    for (std::int64_t t = place + 1; t < end; ++t) tile.sums()[t] = {};
    const f32x16 a = load(x + i), b = load(x + i + kLanes);
    const float largest = from_bits(largest_bits(a, b));
    if (!(largest <= __FLT_MAX__)) {  // NaN or infinity: so is every product with this block
      digits = {};
      const float nan = __builtin_nanf("");
      sums = {nan, nan, {nan, nan}, {}};
      continue;
    }
    // Such a block is nothing beside any other, and not far below that the inverse would overflow.
    const bool none = largest < 1e-30f;
    const float scale = none ? 0.0f : largest * (1.0f / kActLargest);
    const f32x16 inverse = set1(none ? 0.0f : kActLargest / largest);
    const i32x16 qa = to_nearest(a * inverse), qb = to_nearest(b * inverse);
    store_digits(digits, qa, qb);
    const std::int32_t totals[2] = {sum_lanes(qa), sum_lanes(qb)};
    sums = {scale,
            scale * static_cast<float>(totals[0] + totals[1]),
            {scale * static_cast<float>(totals[0]), scale * static_cast<float>(totals[1])},
            {totals[0], totals[1]}};
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
template <class W>
constexpr std::int32_t kZeroCode = kMinusZero<W> ? 0 : W::kZero;

// The codes of kStep words from word At on, as the products take them: times 2^kUp.
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

// Scale number S of 32 columns: of all of them, or of each half.
template <int Scales, int S>
inline std::int32_t total_of(const ActSums& x) {
  return Scales == 1 ? x.totals[0] + x.totals[1] : x.totals[S];
}
template <int Scales, int S>
inline f32x16 sum_of(const ActSums& x) {
  return set1(Scales == 1 ? x.sum : x.half_sums[S]);
}

// Bytes between what is read and what is asked for: into the second-level cache far ahead, as memory is slow,
// and from there into the first. In portions, or requests would wait for a place in the queue.
constexpr std::int64_t kAhead = 4096, kFarAhead = 16384;
template <int Bytes>
inline __attribute__((always_inline)) void prefetch(const std::uint8_t* p) {
  for (int b = 0; b < Bytes; b += 64) {
    __builtin_prefetch(p + kAhead + b);
    __builtin_prefetch(p + kFarAhead + b, 0, 2);
  }
}

// One group of rows times one token, straight from the packed bytes. The words of a scale are summed in two
// halves: a scheduler that is full of one long chain of products has no room for the next.
template <class W>
f32x16 row_sums(const std::uint8_t* p, std::int32_t cols, Tile x, std::int32_t token) {
  constexpr int bytes = kGroup * W::kBytes, groups = W::kColumns / kActBlock;
  f32x16 acc = set1(0.0f);
  for (std::int32_t i = 0; i < cols; i += W::kColumns, p += bytes, x = x.block(groups)) {
    unrolled<groups>([&](auto g) {
      constexpr int from = bytes * g.value / groups / 64 * 64, to = bytes * (g.value + 1) / groups / 64 * 64;
      prefetch<(g.value + 1 < groups ? to : bytes) - from>(p + from);
      const ActDigits& digits = x.block(g.value).digits()[token];
      const ActSums& xg = x.block(g.value).sums()[token];
      unrolled<W::kScales>([&](auto s) {
        constexpr int words = 8 / W::kScales, first = words * s.value, second = first + words / 2;
        constexpr int up = W::template kUp<g.value, first>, up2 = W::template kUp<g.value, second>;
        const std::int32_t minus = -kZeroCode<W> * total_of<W::kScales, s.value>(xg);
        Sums sums = start(minus << up), more = start(0);
        unrolled<words / 2 / kStep>([&](auto w) {
          constexpr int at = first + kStep * w.value, at2 = second + kStep * w.value;
          accumulate<at>(sums, step_codes<W, g.value, at>(p), digits);
          accumulate<at2>(more, step_codes<W, g.value, at2>(p), digits);
        });
        const i32x16 sum = up == up2 ? over_power<up>(total(sums) + total(more))
                                     : over_power<up>(total(sums)) + over_power<up2>(total(more));
        const f32x16 d = W::template scale<g.value, s.value>(p);
        acc = fma(d * set1(xg.scale), to_f32(sum), acc);
        if constexpr (W::kMinima) {
          acc = fma(W::template minimum<g.value, s.value>(p), sum_of<W::kScales, s.value>(xg), acc);
        }
      });
    });
  }
  return acc;
}

// For many tokens a group is taken apart once: 32 columns of it, in a form that all types share.
struct alignas(64) StagedBlock {
  std::uint8_t codes[8][4 * kGroup];
  float scales[2][kGroup], minima[2][kGroup];
};
static_assert(sizeof(StagedBlock) == staged_bytes(kActBlock));

template <class W>
void stage(const std::uint8_t* p, std::int32_t cols, StagedBlock* out) {
  constexpr int groups = W::kColumns / kActBlock;
  for (std::int32_t i = 0; i < cols; i += W::kColumns, p += kGroup * W::kBytes, out += groups) {
    unrolled<groups>([&](auto g) {
      StagedBlock& block = out[g.value];
      unrolled<8 / kStep>([&](auto w) {
        constexpr int at = kStep * w.value;
        const Codes codes = lowered<W::template kUp<g.value, at>>(step_codes<W, g.value, at>(p));
#if defined(__AMX_INT8__)  // whose products take signed bytes
        store_codes(block.codes[at], minus_bytes(codes, W::kZero));
#else
        store_codes(block.codes[at], codes);
#endif
      });
      unrolled<W::kScales>([&](auto s) {
        store(block.scales[s.value], W::template scale<g.value, s.value>(p));
        if constexpr (W::kMinima) store(block.minima[s.value], W::template minimum<g.value, s.value>(p));
      });
    });
  }
}

// A staged group times T tokens of a tile, from number `first` on; the same sums in the same order as
// row_sums().
template <int Scales, bool Minima, int T>
void staged_sums(const StagedBlock* block, std::int32_t cols, std::int32_t zero, Tile x, std::int32_t first,
                 f32x16 (&acc)[T]) {
  constexpr int steps = 8 / Scales / kStep;
  for (std::int32_t i = 0; i < cols; i += kActBlock, ++block, x = x.block(1)) {
    const ActDigits* digits = x.digits() + first;
    const ActSums* numbers = x.sums() + first;
    unrolled<Scales>([&](auto s) {
      Sums sums[T];
      unrolled<T>(
          [&](auto t) { sums[t.value] = start(-zero * total_of<Scales, s.value>(numbers[t.value])); });
      unrolled<steps>([&](auto w) {
        constexpr int at = kStep * (steps * s.value + w.value);
        const Codes codes = load_codes(block->codes[at]);
        unrolled<T>([&](auto t) { accumulate<at>(sums[t.value], codes, digits[t.value]); });
      });
      const f32x16 d = load(block->scales[s.value]);
      unrolled<T>([&](auto t) {
        acc[t.value] = fma(d * set1(numbers[t.value].scale), to_f32(total(sums[t.value])), acc[t.value]);
      });
      if constexpr (Minima) {
        const f32x16 m = load(block->minima[s.value]);
        unrolled<T>(
            [&](auto t) { acc[t.value] = fma(m, sum_of<Scales, s.value>(numbers[t.value]), acc[t.value]); });
      }
    });
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
  const std::int32_t whole = kTokens > 1 ? a.n_tokens / kTokens * kTokens : 0;
  for (std::int32_t group = begin; group < end; ++group) {
    for (std::int32_t token = 0; token < whole; token += kTokens)
      float_groups<W, 1, kTokens>(a, group, token);
  }
  std::int32_t group = begin;
  for (; group + 4 <= end; group += 4) {
    for (std::int32_t token = whole; token < a.n_tokens; ++token) float_groups<W, 4, 1>(a, group, token);
  }
  for (; group < end; ++group) {
    for (std::int32_t token = whole; token < a.n_tokens; ++token) float_groups<W, 1, 1>(a, group, token);
  }
}

}  // namespace
}  // namespace ringlm::cpu

#if defined(__AMX_INT8__)
#include "cpu/matmul_amx.h"
#endif

namespace ringlm::cpu {
namespace {

// A staged group times all tokens.
template <int Scales, bool Minima>
void staged_tokens(const MatmulArgs& a, std::int32_t group, const StagedBlock* staged, std::int32_t zero) {
#if defined(__AMX_INT8__)
  (void)zero;
  amx_tokens<Scales, Minima>(a, group, staged);
#else
  for (std::int32_t token = 0; token < a.n_tokens; token += kTokens) {
    f32x16 acc[kTokens];
    for (f32x16& sum : acc) sum = set1(0.0f);
    const Tile x = tile_of(a.quantized, a.w.cols, token, a.n_tokens);
    staged_sums<Scales, Minima, kTokens>(staged, a.w.cols, zero, x, token % kActTile, acc);
    const std::int32_t n = a.n_tokens - token;
    for (int t = 0; t < kTokens && t < n; ++t) write_group(a, group, token + t, acc[t]);
  }
#endif
}

template <class W>
void quantized_matmul(const MatmulArgs& a, std::int32_t begin, std::int32_t end, void* scratch) {
  for (std::int32_t group = begin; group < end; ++group) {
    const std::uint8_t* p = a.w.data + static_cast<std::size_t>(group) * a.w.group_bytes();
    if (a.n_tokens >= kStageFrom) {
      auto* staged = static_cast<StagedBlock*>(scratch);
      stage<W>(p, a.w.cols, staged);
      staged_tokens<W::kScales, W::kMinima>(a, group, staged, kZeroCode<W>);
      continue;
    }
    for (std::int32_t token = 0; token < a.n_tokens; ++token) {
      const Tile x = tile_of(a.quantized, a.w.cols, token, a.n_tokens);
      write_group(a, group, token, row_sums<W>(p, a.w.cols, x, token % x.tokens));
    }
  }
}

void matmul(const MatmulArgs& a, std::int32_t begin, std::int32_t end, void* scratch) {
  if (with_packed(a.w.type, [&](auto w) { quantized_matmul<decltype(w)>(a, begin, end, scratch); })) return;
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

// The inner loops of the CPU backend, compiled once per instruction set and chosen at run time.
//
// The order in which an output is summed is the same for one token and for many, for every cut of the work
// among threads, and for every place of a row in a tile: results are bit-equal across all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/pack.h"
#include "gguf/types.h"
#include "kv/cache.h"

namespace ringlm::cpu {

using kv::kTile;

// 32 columns of activations in 16 bits: x = scale q, |q| <= kActLargest. Eight bits would be enough for text
// that reads well, but not for the perplexity of the model: docs/performance.md.
constexpr std::int32_t kActBlock = 32;
constexpr float kActLargest = 127.0f * 256.0f + 127.0f;  // 256 high + low, both digits in [-128, 127]
struct alignas(32) ActBlock {
  std::int32_t digits[16];  // q, in the order of the instruction set (cpu/words.h)
  float scale;
  float sum, half_sums[2];  // scale times the sum of q, over all columns and over 16 each
  std::int32_t totals[2];   // sums of q over 16 columns
};

// y[m][r] (+)= sum_k W[r][k] x[m][k] + bias[r] for the rows of some groups, and all m.
struct MatmulArgs {
  MatrixView w;
  const float* bias;  // [rows] or null
  const float* x;     // [n_tokens, cols]
  const ActBlock*
      quantized;  // [n_tokens, cols / kActBlock], which packed types with blocks need instead of x
  std::int32_t n_tokens;
  float* y;                      // [n_tokens, rows]
  bool add;                      // into y, instead of replacing it
  float* const* into = nullptr;  // [n_tokens]: where each token's outputs go instead of y, or null
};

// One tile of keys and values against the query heads of one group. Its rows lie in n consecutive slots, or
// in two runs of them where the ring wraps inside the tile.
struct TileArgs {
  const float* q;  // [group, head_dim]
  std::int32_t group;
  std::int32_t head_dim;
  float scale;  // of the scores: 1 / sqrt(head_dim)
  kv::Rows k, v;
  std::int64_t slot;     // of the first row
  std::int32_t n;        // rows, 1 to kTile
  std::int32_t n_first;  // of them before the wrap
  std::int64_t wrapped;  // slot of the first row behind the wrap
  const float* offsets;  // added to the products q k of each head, every offset_stride floats; or null
  std::int32_t offset_stride;
};

// The state of a softmax over some tiles, of one query head: out = sum / total.
//   largest = max score, total = sum of e^(score - largest), sum [head_dim] = the same weights on v.
struct Partial {
  float largest;
  float total;
};

struct Kernels {
  const char* name;

  void (*dequantize_row)(gguf::DType type, const std::uint8_t* row, float* y, std::int32_t n);

  // Groups [begin, end) of a.w, which is packed.
  void (*matmul)(const MatmulArgs& a, std::int32_t begin, std::int32_t end);

  // n columns, a multiple of kActBlock.
  void (*quantize)(const float* x, ActBlock* y, std::int32_t n);

  // Rows [begin, end) of a.w as in the file, turned into float32 on the way. scratch: [kRowTile * cols]
  // floats of this thread.
  void (*row_matmul)(const MatmulArgs& a, std::int32_t begin, std::int32_t end, float* scratch);

  // y = w x / sqrt(mean(x^2) + eps), n elements.
  void (*rms_norm)(const float* x, const float* w, float eps, float* y, std::int32_t n);

  // gate = silu(gate) * up
  void (*silu_mul)(float* gate, const float* up, std::int64_t n);

  // kv::rotate and kv::rotate_back; `tables` is rotation_tables(r).
  void (*rotate)(const kv::Rotation& r, const float* tables, float* x, bool back);

  void (*store_row)(const kv::Rows& rows, std::int64_t slot, const float* src, std::int32_t n);

  // parts [group], sums [group, head_dim]
  void (*attend_tile)(const TileArgs& a, Partial* parts, float* sums);

  // Adds a later tile to an earlier state of the same head.
  void (*merge)(Partial& into, float* into_sum, const Partial& from, const float* from_sum,
                std::int32_t head_dim);

  // out = sum / total
  void (*finish)(const Partial& part, const float* sum, float* out, std::int32_t head_dim);
};

constexpr std::int32_t kRowTile = 4;  // weight rows that a matmul turns into float32 at a time

constexpr std::size_t matmul_scratch(std::int32_t cols) {
  return std::size_t{kRowTile} * static_cast<std::size_t>(cols);
}

// Blocks with a Paley matrix, up to a size, are multiplied out. (static: see kernels_body.h)
constexpr std::int32_t kMostDense = 192;
static inline bool is_dense(const kv::Rotation& r) {
  const std::int32_t block = r.m * r.width;
  return r.m != 1 && block % 16 == 0 && block <= kMostDense;
}

// Signs of the rotation, [head_dim]; Sylvester's matrix of order kLanes; where blocks are dense, the
// transform and its inverse, both without signs and column by column.
std::vector<float> rotation_tables(const kv::Rotation& r);

// The fastest set that this processor runs. RINGLM_ISA forces one by its name, for tests: generic, avx2,
// avxvnni, avx512, amx, and on ARM neon, dotprod, i8mm; one that the processor lacks is InvalidArgument.
const Kernels& kernels();

// All that this processor runs, fastest first.
std::vector<const Kernels*> runnable_kernels();

#if defined(__aarch64__)
extern const Kernels kNeon;
extern const Kernels kDotprod;
extern const Kernels kI8mm;
#else
extern const Kernels kGeneric;
#endif
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvxVnni;
extern const Kernels kAvx512;
extern const Kernels kAmx;
#endif

}  // namespace ringlm::cpu

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

// Functions here are static, since kernels call them: see kernels_body.h.

using kv::kTile;

// 32 columns of a token's activations in 16 bits: x = scale q, |q| <= kActLargest. Eight bits would be enough
// for text that reads well, but not for the perplexity of the model: docs/performance.md.
constexpr std::int32_t kActBlock = 32;
constexpr float kActLargest = 127.0f * 256.0f + 127.0f;  // 256 high + low, both digits in [-128, 127]
struct alignas(32) ActDigits {
  std::int32_t words[16];  // q, in the order of the instruction set (cpu/words.h)
};
struct alignas(32) ActSums {
  float scale;
  float sum, half_sums[2];  // scale times the sum of q, over all columns and over 16 each
  std::int32_t totals[2];   // sums of q over 16 columns
};

// Tokens come in tiles: of one in a step of one token, else of 16, the last one filled up with tokens whose
// sums are zero. A tile has for every 32 columns the digits of its tokens and then their sums.
constexpr std::int32_t kActTile = 16;
static constexpr std::int32_t act_tile(std::int64_t n_tokens) { return n_tokens == 1 ? 1 : kActTile; }
constexpr std::size_t kActBytes = sizeof(ActDigits) + sizeof(ActSums);  // of 32 columns of a token
static constexpr std::size_t act_bytes(std::int32_t cols, std::int64_t n_tokens) {
  const std::int64_t tile = act_tile(n_tokens), tokens = (n_tokens + tile - 1) / tile * tile;
  return static_cast<std::size_t>(tokens * (cols / kActBlock)) * kActBytes;
}

// y[m][r] (+)= sum_k W[r][k] x[m][k] + bias[r] for the rows of some groups, and all m.
struct MatmulArgs {
  MatrixView w;
  const float* bias;           // [rows] or null
  const float* x;              // [n_tokens, cols]
  const std::byte* quantized;  // [act_bytes(cols, n_tokens)]: what packed types with blocks need instead of x
  std::int32_t n_tokens;
  float* y;                      // [n_tokens, rows]
  bool add;                      // into y, instead of replacing it
  float* const* into = nullptr;  // [n_tokens]: where each token's outputs go instead of y, or null
};

// Attention works in spans of this many consecutive positions, aligned to it: each is a softmax of its own,
// and spans are merged in ascending position.
constexpr std::int32_t kSpan = 4 * kTile;

// Floats of a sum over values: head_dim, in whole pieces of 64.
static constexpr std::int32_t state_width(std::int32_t head_dim) { return (head_dim + 63) / 64 * 64; }

// A block of queries that read the same keys: the heads of one group, of consecutive tokens.
struct QueryArgs {
  const float* q;  // head 0 of the group, of the first token; [group, head_dim] every token_stride floats
  std::int64_t token_stride;
  std::int32_t n_tokens;
  std::int32_t group;
  std::int32_t head_dim;
  float scale;  // of the scores
  KvFormat keys;
};

// Positions [begin, end) of a span, counted from its start.
struct Range {
  std::int32_t begin, end;
};

// A span of keys and values against prepared queries. The rows that anyone sees lie in consecutive slots, or
// in two runs of them where the ring wraps inside the span; no others are read.
struct SpanArgs {
  std::int32_t n;  // queries: tokens times group
  std::int32_t head_dim;
  float scale;
  float softcap;  // scores become softcap tanh(score / softcap); 0: they do not
  kv::Rows k, v;
  Range all;                      // what any query sees: not empty
  const Range* seen;              // [n] what each query sees
  std::int64_t slot;              // of position all.begin
  std::int32_t wrap;              // the first position behind the wrap; all.end where there is none
  std::int64_t wrapped;           // its slot
  const float* offsets;           // [kSpan / kTile, n] added to the products q k in each tile; or null
  const std::uint8_t* next_keys;  // the row of keys that this thread probably reads next; or null
};

// The state of a softmax over some tiles, of one query head: out = sum / total.
//   largest = max score, total = sum of e^(score - largest), sum [state_width] = the same weights on v.
struct Partial {
  float largest;
  float total;
};

struct Kernels {
  const char* name;

  void (*dequantize_row)(gguf::DType type, const std::uint8_t* row, float* y, std::int32_t n);

  // Groups [begin, end) of a.w, which is packed. scratch: [staged_bytes(cols)] of this thread, 64-byte
  // aligned.
  void (*matmul)(const MatmulArgs& a, std::int32_t begin, std::int32_t end, void* scratch);

  // x [n], a multiple of kActBlock, as token number `token` of n_tokens. y: [act_bytes(n, n_tokens)], aligned
  // to 64 bytes.
  void (*quantize)(const float* x, std::int32_t n, std::byte* y, std::int64_t token, std::int64_t n_tokens);

  // Rows [begin, end) of a.w as in the file, turned into float32 on the way. scratch: [kRowTile * cols]
  // floats of this thread.
  void (*row_matmul)(const MatmulArgs& a, std::int32_t begin, std::int32_t end, float* scratch);

  // y = w x / sqrt(mean(x^2) + eps), n elements.
  void (*rms_norm)(const float* x, const float* w, float eps, float* y, std::int32_t n);

  // gate = silu(gate) * up, gate = gelu(gate) * up (its approximation by tanh)
  void (*silu_mul)(float* gate, const float* up, std::int64_t n);
  void (*gelu_mul)(float* gate, const float* up, std::int64_t n);

  // x = cap tanh(scale x / cap), or scale x where cap is 0.
  void (*soft_cap)(float* x, std::int64_t n, float scale, float cap);

  // kv::rotate and kv::rotate_back; `tables` is rotation_tables(r).
  void (*rotate)(const kv::Rotation& r, const float* tables, float* x, bool back);

  void (*store_row)(const kv::Rows& rows, std::int64_t slot, const float* src, std::int32_t n);

  // For attend_span. workspace: [workspace_floats(head_dim, n_tokens * group)], for both.
  void (*prepare_queries)(const QueryArgs& a, float* workspace);

  // parts [n], sums [n, state_width]. A query that sees nothing gets {-infinity, 0} and zeros.
  void (*attend_span)(const SpanArgs& a, float* workspace, Partial* parts, float* sums);

  // Adds a later span to an earlier state of the same head. width: state_width
  void (*merge)(Partial& into, float* into_sum, const Partial& from, const float* from_sum,
                std::int32_t width);

  // out = sum / total
  void (*finish)(const Partial& part, const float* sum, float* out, std::int32_t head_dim);
};

// A group of rows taken apart for many tokens: a byte a code, and two scales and minima for 32 columns.
static constexpr std::size_t staged_bytes(std::int32_t cols) {
  return static_cast<std::size_t>(cols / kActBlock) * kGroup * (kActBlock + 4 * sizeof(float));
}

constexpr std::int32_t kRowTile = 4;  // weight rows that a matmul turns into float32 at a time

static constexpr std::size_t matmul_scratch(std::int32_t cols) {
  return std::size_t{kRowTile} * static_cast<std::size_t>(cols);
}

// Queries and a tile of keys or values; per query the scores of a span, the weights of a tile as bytes, and
// four numbers.
static constexpr std::size_t workspace_floats(std::int32_t head_dim, std::int32_t n) {
  const auto width = static_cast<std::size_t>(state_width(head_dim)), queries = static_cast<std::size_t>(n);
  const std::size_t floats = (queries + kTile) * width + queries * (kSpan + kTile * 3 / 4 + 4);
  return (floats + 15) / 16 * 16;
}

// Blocks with a Paley matrix, up to a size, are multiplied out.
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

// The kernels of the backend as its host side sees them: what each is given, and the function that launches
// it. One header per operation has the kernel and says how it is mapped; the .cu file of that name picks
// the template and launches.
//
// A step of up to kMostRows rows (decode, a batch of sessions, a short prefill) goes through six launches a
// layer: gemv, rope_append, attend, gemv, gemv, gemv. The input of a product is quantized once, by the kernel
// that makes it; a norm's weight is applied then and its scale by the product, at its end. A step of more
// rows (prefill) takes gemm and prefill_attention, with halves between them and a kernel for each norm.
//
// All pointers are to device memory, and launches are asynchronous. A launch throws DeviceError.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gguf/types.h"
#include "ops/device.h"
#include "ringlm/config.h"
#include "ringlm/kv_format.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "simt/half.h"
#include "simt/simt.h"
#endif

namespace ringlm::cuda {

#if defined(__CUDACC__)
using Stream = cudaStream_t;
#else
using Stream = simt::Stream;
#endif

constexpr int kBlock = 32;         // columns that share a scale
constexpr int kGroupRows = 4;      // rows of a matrix that lie together (pack.h)
constexpr int kMostRows = 8;       // rows of a step that gemv takes
constexpr int kEpochs = 3;         // ops/ops.h: own, previous, of the pinned rows
constexpr int kMostExperts = 512;  // of a layer

__host__ __device__ constexpr int blocks_of(int cols) { return (cols + kBlock - 1) / kBlock; }

// ---- what lies in device memory

// The rows of one layer and session, as kv::Cache::Layer has them, and its ring (kv/ring.h).
struct KvLayer {
  std::uint8_t *k, *v;                // [n_head_kv, capacity, head_dim], 16-byte aligned
  std::uint8_t *k_scales, *v_scales;  // [n_head_kv, capacity] f16; INT8 only
  std::int64_t visible, pinned, capacity;
};

// One row of a step. The host writes it anew for every step, so a captured graph stays as it is.
struct DeviceRow {
  std::int64_t position;
  std::int64_t epoch;     // positions an epoch has (kv/cache.h)
  const KvLayer* layers;  // [n_layer] of the row's session
  std::int32_t token;
};

// A weight matrix in the decode layout of pack.h.
struct DeviceMatrix {
  gguf::DType type;
  std::int32_t rows, cols;
  const std::uint8_t* data;   // 256-byte aligned
  std::size_t expert_stride;  // bytes from one expert's matrix to the next; 0: there are none
};

// M rows of activations as the input of gemv, quantized as on the CPU (cpu/kernels.h) in blocks of 32
// columns; what is behind `cols` is zero.
//   value = step code,   step = max |value| / 32639,   code = 256 high + low, both digits in [-128, 127]
struct Quantized {
  std::int8_t* digits;  // [M, 4, blocks, 16]: high of columns 0-15 and 16-31 of a block, then low of them
  float4* scales;       // [M, blocks] step, step * (sum of codes 0-15), the same of 16-31, sum of both
  float* squares;       // [M, blocks] sum of x^2 before the norm's weight; null where there is no norm
  std::int32_t cols;

  // Bytes of the three for M rows; each begins at a multiple of 16 bytes.
  static constexpr std::size_t digit_bytes(int cols, std::int64_t M) {
    return static_cast<std::size_t>(M) * static_cast<std::size_t>(blocks_of(cols)) * 64;
  }
  static constexpr std::size_t scale_bytes(int cols, std::int64_t M) {
    return static_cast<std::size_t>(M) * static_cast<std::size_t>(blocks_of(cols)) * 16;
  }
  static constexpr std::size_t square_bytes(int cols, std::int64_t M) {
    return static_cast<std::size_t>(M) * static_cast<std::size_t>(blocks_of(cols)) * 4;
  }
};

// M rows of activations as the input of gemm: value = x * step, and step is a power of two that brings the
// largest of its row below 2^14, so that none overflows. What is behind `cols`, up to a multiple of 32, is 0.
struct Halves {
  half* x;       // [M, stride]
  float* steps;  // [M]
  std::int32_t cols;
  std::int32_t stride() const { return blocks_of(cols) * kBlock; }
};

// ---- pack.h: matrices from the order of the file into that of the kernels

bool can_pack(gguf::DType type);
std::size_t packed_bytes(gguf::DType type, std::int64_t rows, std::int32_t cols);
// Rows [first, first + n) of the file, first a multiple of kGroupRows; n too, except at the matrix's end.
// file: [n, row bytes] in device memory, 16-byte aligned.
void pack(const DeviceMatrix& to, std::uint8_t* data, const std::uint8_t* file, std::int64_t first,
          std::int64_t n, Stream stream);

// ---- embed.h: x = rows of the table, scaled; and the input of the first product, where next.digits

struct Embed {
  const DeviceRow* rows;
  int M;
  DeviceMatrix table;
  float scale;
  float* x;                // [M, cols]
  const float* next_norm;  // [cols] or null
  Quantized next;
};
void embed(const Embed& a, Stream stream);

// ---- gemv.h: up to three products of one input, and what follows

enum class End {
  Store,     // y = scale * (W x + bias), soft cap
  Residual,  // x += scale * (W x + bias), and the next input: x (times next_norm), with its squares
  GateUp,    // w[0] gate, w[1] up: the next input is activation(gate) * up
};

struct Gemv {
  DeviceMatrix w[3];  // all of one type and one number of columns
  int n;              // of them
  Quantized x;        // [M, w[0].cols]; where it has squares, products are divided by its root mean square
  int M;              // 1 to kMostRows
  float norm_eps;
  const float* bias[3];  // [rows] or null
  End end;
  float* y[3];             // Store: [M, rows] each. GateUp: y[0] too, in float32, where it is not null
  float scale, softcap;    // softcap 0: none
  float* residual;         // [M, rows]
  const float* next_norm;  // [rows] or null: then next has no squares
  Quantized next;          // digits null: none is wanted
  Activation activation;
  // Experts: row m of the step has `slots` of them, and the row i = m * slots + j of y and next is of
  // expert[i]'s matrix. The input's row is m, or i where `input_by_slot`. null: there are none.
  const std::int32_t* experts;
  int slots;
  bool input_by_slot;
};
void gemv(const Gemv& a, Stream stream);

// ---- rope_append.h: norm of q and k, their turning, Walsh-Hadamard, and the write into the ring

struct RopeAppend {
  const DeviceRow* rows;
  int M;
  int layer;
  float *q, *q_pinned;           // [M, n_head, head_dim]; q in, both out
  float *k, *v;                  // [M, n_head_kv, head_dim]; out: what is stored, before rounding
  const float *q_norm, *k_norm;  // [head_dim], or [n_head head_dim] and [n_head_kv head_dim], or null
  QkNorm qk_norm;
  float norm_eps;
  const float *own, *pinned, *epochs;  // angles: ops/ops.h; null: nothing turns
  std::int32_t rope_dims;
  RopePairing pairing;
  const float* k_bias;  // [n_head_kv head_dim], or null: keys are not centred
  float* offsets;       // [M, n_head, kEpochs]
  std::int32_t n_head, n_head_kv, head_dim;
  KvFormat k_format, v_format;
  std::uint32_t* bad;  // [M] becomes 1 where a key or value does not fit its format
};
void rope_append(const RopeAppend& a, Stream stream);

// ---- attend.h and prefill_attention.h

struct Attend {
  const DeviceRow* rows;
  int M;
  int layer;
  const float *q, *q_pinned;  // [M, n_head, head_dim], as rope_append left them
  const float* offsets;       // [M, n_head, kEpochs], or null: keys are not centred
  std::int32_t n_head, n_head_kv, head_dim;
  KvFormat k_format, v_format;
  float scale, softcap;
  float* att;         // [M, n_head, head_dim]
  Quantized out;      // of att as one row; digits null: none is wanted
  int splits;         // of attend: blocks per row and KV head, the same for every length
  float* partial;     // [attend_partial_floats]
  unsigned* arrived;  // [M, n_head_kv], zero before and after
};
// Whether attend writes `out`: where the heads of a group are whole blocks. If not, to_quantized has to.
inline bool attend_quantizes(const Attend& a) {
  return a.out.digits != nullptr && a.n_head / a.n_head_kv * a.head_dim % kBlock == 0;
}
std::size_t attend_partial_floats(const Attend& a);
void attend(const Attend& a, Stream stream);             // every row has a cache of its own, or not
void prefill_attention(const Attend& a, Stream stream);  // rows are consecutive positions of one session

// ---- gemm.h: y [M, rows] (+)= scale * (W x + bias)

struct Gemm {
  DeviceMatrix w;
  Halves x;
  int M;
  const float* bias;  // [rows] or null
  float* y;
  bool add;
  float scale;
};
void gemm(const Gemm& a, Stream stream);

// ---- norm.h: what is between products where they do not do it themselves

// to = RMSNorm(x) * norm. norm null: no norm. Rows are those of `index` [M], or 0 to M - 1 where it is null.
struct Normed {
  const float* x;  // [.., cols]
  const std::int32_t* index;
  int M, cols;
  const float* norm;
  float eps;
};
void to_quantized(const Normed& a, const Quantized& to, Stream stream);  // to.squares gives the norm's scale
void to_halves(const Normed& a, const Halves& to, Stream stream);

// x += scale * RMSNorm(y), the norm where `norm` is there; then the next input, where next.digits.
struct AddNormed {
  float* x;        // [M, cols]
  const float* y;  // [M, cols]
  const float* norm;
  float scale, eps;
  int M, cols;
  const float* next_norm;
  Quantized next;
};
void add_normed(const AddNormed& a, Stream stream);

// gate = activation(gate) * up, [M, n]
void gate_up(float* gate, const float* up, int M, int n, Activation activation, Stream stream);

// bad[m] = 1 where a row of x [M, n] has a number that is not finite.
void check_finite(const float* x, int M, int n, std::uint32_t* bad, Stream stream);

// ---- experts.h

struct Route {
  const float* scores;  // [M, n_expert]
  const float* shared;  // [M] of the shared expert, or null
  int M, n_expert, n_used;
  bool normalize;         // weights of the chosen ones sum to one
  std::int32_t* experts;  // [M, n_used]
  float* weights;         // [M, n_used + 1 where shared]
};
void route(const Route& a, Stream stream);  // as ops/route.cpp does

// y [M, cols] = sum over a row's slots of weights * from. from: [M n_used, cols], and that of the shared
// expert [M, cols] or null.
void mix_experts(const float* from, const float* shared, const float* weights, int M, int n_used, int cols,
                 float* y, Stream stream);

// ---- head.h: what greedy and top-k need of logits, and whether all are finite

struct TopK {
  const float* logits;  // [M, n_vocab]
  int M, n_vocab;
  int k;               // 1 to kTopLogits; 1 is argmax
  TopLogits* out;      // [M]
  std::byte* scratch;  // [top_k_scratch_bytes]
  unsigned* arrived;   // [M], zero before and after
  std::uint32_t* bad;  // [M] becomes 1 where a logit is not finite
};
std::size_t top_k_scratch_bytes(const TopK& a);
void top_k(const TopK& a, Stream stream);

// ---- runtime.h. Behind every launch: throws DeviceError, naming the operation, where it was refused.
void check_launch(const char* operation);

}  // namespace ringlm::cuda

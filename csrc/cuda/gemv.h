// y = W x for up to eight rows x of a step, for up to three matrices at once, and what follows: a store, the
// residual, or the gate of a feed-forward network; then the quantized input of the next product.
//
// Byte floor: every byte of the packed weights once, whatever M is: rows * cols * (bytes of a block / 32).
// Activations (about 80 bytes for 32 columns and row) come from L1 and L2.
//
// A block of 8 warps makes 32 rows of y, which are one block of the next input. A warp owns a group of four
// rows, lane b block b of each tile: it holds a piece of 16 bytes of each row and the scales of all of them,
// and multiplies with the digits of x, which it loads once for the four rows. Integers are exact, sums of
// blocks are float32: per lane over the tiles in ascending order, then over lanes by halves. That order, and
// every rounding in it, is the same for every M, so that a row of a batch is the row alone, bit for bit;
// hence the explicit fmaf. GateUp multiplies with its two matrices in turn.
//
// Experts: blockIdx.y is the row i of launch.h; each multiplies with a matrix of its own, as if M were 1.
// Shared memory 2 KiB. Registers: up to 80 for M = 1 (Q6_K 92), up to 128 for more. Shapes: any rows; cols a
// multiple of the type's block.
#pragma once

#include "cuda/activation.h"
#include "cuda/pack.h"
#include "cuda/quantize.h"
#include "cuda/reduce.h"

namespace ringlm::cuda {

constexpr int kGemvWarps = kBlock / kGroupRows;

// What a lane has of its block: four rows of it.
template <gguf::DType kType>
struct LaneWeights {
  static constexpr Layout kLayout = layout_of(kType);
  uint4 pieces[kGroupRows][kLayout.codes / 16];
  uint4 high[kLayout.high == 8 ? 2 : 1];
  std::uint32_t scales[4], super[4];  // rows in ascending order, without gaps

  __device__ void load(const std::uint8_t* tile, TilePlaces<kType> at, int block) {
    const auto four_words = [&](int offset) {
      return ld_global_stream(reinterpret_cast<const uint4*>(tile + offset));
    };
    // kBytes of each row, of which there are 2 or 4.
    const auto of_rows = [&]<int kBytes>(std::integral_constant<int, kBytes>, int offset,
                                         std::uint32_t (&to)[4]) {
      if constexpr (kBytes == 4) {
        const uint4 words = ld_global_stream(reinterpret_cast<const uint4*>(tile + offset));
        to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
      } else if constexpr (kBytes == 2) {
        const uint2 words = ld_global_stream(reinterpret_cast<const uint2*>(tile + offset));
        to[0] = words.x, to[1] = words.y;
      }
    };
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
#pragma unroll
      for (int p = 0; p < kLayout.codes / 16; ++p) pieces[r][p] = four_words(at.codes(r, p, block));
    }
    if constexpr (kLayout.high != 0) high[0] = four_words(at.high(0, block));
    if constexpr (kLayout.high == 8) high[1] = four_words(at.high(2, block));
    of_rows(std::integral_constant<int, kLayout.scales>{}, at.scales(0, block), scales);
    of_rows(std::integral_constant<int, kLayout.super>{}, at.super(0, block), super);
  }

  __device__ uint2 high_of(int r) const {
    if constexpr (kLayout.high == 8) {
      const uint4 two = high[r / 2];
      return r % 2 == 0 ? make_uint2(two.x, two.y) : make_uint2(two.z, two.w);
    } else if constexpr (kLayout.high == 4) {
      return make_uint2(r == 0 ? high[0].x : r == 1 ? high[0].y : r == 2 ? high[0].z : high[0].w, 0);
    } else {
      return {};
    }
  }
  template <int kBytes>
  static __device__ std::uint32_t bits_of(const std::uint32_t (&words)[4], int r) {
    if constexpr (kBytes == 4) {
      return words[r];
    } else if constexpr (kBytes == 2) {
      return words[r / 2] >> 16 * (r % 2);
    } else {
      return 0;
    }
  }
  __device__ Scale scale(int r) const {
    return scale_of<kType>(bits_of<kLayout.scales>(scales, r), bits_of<kLayout.super>(super, r));
  }
};

// The digits of 16 columns of a row, their step, and step times the sum of their codes.
struct LaneInput {
  int high[4], low[4];
  float step, sum;

  __device__ LaneInput(const Quantized& x, int row, int block, int blocks, int side) {
    const std::int8_t* const at =
        x.digits + ((static_cast<std::int64_t>(row) * 4 + side) * blocks + block) * 16;
    const int4 h = ld_global(reinterpret_cast<const int4*>(at));
    const int4 l = ld_global(reinterpret_cast<const int4*>(at + 2 * blocks * 16));
    const float4 scales = ld_global(x.scales + static_cast<std::int64_t>(row) * blocks + block);
    high[0] = h.x, high[1] = h.y, high[2] = h.z, high[3] = h.w;
    low[0] = l.x, low[1] = l.y, low[2] = l.z, low[3] = l.w;
    step = scales.x;
    sum = side == 0 ? scales.y : scales.z;
  }

  // step times the sum of products of codes.
  __device__ float times(const std::uint32_t (&words)[4], float add) const {
    int of_high = 0, of_low = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      of_high = dp4a(static_cast<int>(words[w]), high[w], of_high);
      of_low = dp4a(static_cast<int>(words[w]), low[w], of_low);
    }
    return fmaf(step, static_cast<float>(of_high * 256 + of_low), add);
  }
};

// x of kCount columns from `first` on, of a block, from digits.
template <int kCount>
__device__ __forceinline__ void input_values(const Quantized& x, int row, int block, int blocks, int first,
                                             float (&values)[kCount]) {
  const std::int8_t* const at =
      x.digits + ((static_cast<std::int64_t>(row) * 4 + first / 16) * blocks + block) * 16 + first % 16;
  const float step = ld_global(&x.scales[static_cast<std::int64_t>(row) * blocks + block].x);
#pragma unroll
  for (int c = 0; c < kCount; c += 4) {
    const std::uint32_t high = ld_global(reinterpret_cast<const std::uint32_t*>(at + c));
    const std::uint32_t low = ld_global(reinterpret_cast<const std::uint32_t*>(at + 2 * blocks * 16 + c));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int code = static_cast<std::int8_t>(high >> 8 * i) * 256 + static_cast<std::int8_t>(low >> 8 * i);
      values[c + i] = step * static_cast<float>(code);
    }
  }
}

// sums[r][m] += of this lane's blocks of a group of rows, for the M input rows from `first` on.
template <gguf::DType kType, int kM>
__device__ __forceinline__ void multiply_group(const std::uint8_t* group, const Quantized& x, int first,
                                               int M, float (&sums)[kGroupRows][kM]) {
  using Places = TilePlaces<kType>;
  const int lane = static_cast<int>(threadIdx.x) % 32, blocks = blocks_of(x.cols);
  const std::uint8_t* tile = group;
#pragma unroll 1
  for (int block = lane; block < blocks; block += kTileBlocks) {
    const Places at{min(kTileBlocks, blocks - (block - lane))};
    if constexpr (kFloats<kType>) {
      constexpr int kColumns = kBlock / Places::kPieces;
#pragma unroll 1
      for (int p = 0; p < Places::kPieces; ++p) {
        uint4 pieces[kGroupRows];
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
          pieces[r] = ld_global_stream(reinterpret_cast<const uint4*>(tile + at.codes(r, p, lane)));
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (kM > 1 && m >= M) break;
          float values[kColumns];
          input_values(x, first + m, block, blocks, p * kColumns, values);
#pragma unroll
          for (int r = 0; r < kGroupRows; ++r) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              sums[r][m] = fmaf(float_of<kType>(pieces[r], c), values[c], sums[r][m]);
            }
          }
        }
      }
    } else {
      LaneWeights<kType> w;
      w.load(tile, at, lane);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        std::uint32_t words[kGroupRows][4];
        Scale scales[kGroupRows];
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
          unpack<kType>(w.pieces[r], w.high_of(r), side, words[r]);
          scales[r] = w.scale(r);
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          if (kM > 1 && m >= M) break;
          const LaneInput in(x, first + m, block, blocks, side);
          const float zero = kZero<kType> == 0 ? 0.0f : -static_cast<float>(kZero<kType>) * in.sum;
#pragma unroll
          for (int r = 0; r < kGroupRows; ++r) {
            const float d = kHalfScales<kType> && side == 1 ? scales[r].m : scales[r].d;
            sums[r][m] = fmaf(d, in.times(words[r], zero), sums[r][m]);
            if constexpr (kMinima<kType>) sums[r][m] = fmaf(scales[r].m, in.sum, sums[r][m]);
          }
        }
      }
    }
    tile += tile_offset(layout_of(kType), kTileBlocks);
  }
}

// Of the norm of an input row, by a warp.
__device__ __forceinline__ float inverse_rms(const Quantized& x, int row, float eps) {
  const int lane = static_cast<int>(threadIdx.x) % 32, blocks = blocks_of(x.cols);
  float sum = 0.0f;
  for (int b = lane; b < blocks; b += 32) {
    sum += ld_global(x.squares + static_cast<std::int64_t>(row) * blocks + b);
  }
  return inverse_rms(warp_sum(sum), x.cols, eps);
}

template <class T>
__device__ __forceinline__ T pick(const T (&of)[3], int i) {
  return i == 0 ? of[0] : i == 1 ? of[1] : of[2];
}

// Blocks that a multiprocessor has room for: with 80 registers all loads of a tile are under way before the
// first is used, as they are not with 64.
template <gguf::DType kType, int kM>
constexpr int kResident = kM > 1 || kHalfScales<kType> ? 2 : 3;

template <gguf::DType kType, int kM>
__global__ void __launch_bounds__(32 * kGemvWarps, (kResident<kType, kM>)) gemv_rows(Gemv a) {
  SMEM_STATIC(float, products, 2 * kM * kBlock);  // [gate and up][m][row]
  SMEM_STATIC(float, inverse, kM);                // of the root mean square of the input
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;

  // The 32 rows of this block, and the inputs.
  int product = 0, tile = static_cast<int>(blockIdx.x);
  while (a.end == End::Store && product + 1 < a.n) {
    const int tiles = blocks_of(pick(a.w, product).rows);
    if (tile < tiles) break;
    tile -= tiles;
    ++product;
  }
  const int slot = static_cast<int>(blockIdx.y), M = a.experts ? 1 : a.M;
  const int input = !a.experts ? 0 : a.input_by_slot ? slot : slot / a.slots;
  const auto expert = static_cast<std::size_t>(a.experts ? ld_global(a.experts + slot) : 0);
  if (a.x.squares && warp < M) {
    const float value = inverse_rms(a.x, input + warp, a.norm_eps);
    if (lane == 0) st_shared(&inverse[warp], value);
  }

  const int parts = a.end == End::GateUp ? 2 : 1, group = tile * kGemvWarps + warp;
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    const DeviceMatrix w = pick(a.w, product + part);
    if (group * kGroupRows >= w.rows) break;
    float sums[kGroupRows][kM] = {};
    multiply_group<kType, kM>(
        w.data + expert * w.expert_stride +
            static_cast<std::size_t>(group) *
                static_cast<std::size_t>(group_bytes(layout_of(kType), blocks_of(a.x.cols))),
        a.x, input, M, sums);
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if (kM > 1 && m >= M) break;
        const float sum = warp_sum(sums[r][m]);
        if (lane == r) st_shared(&products[(part * kM + m) * kBlock + warp * kGroupRows + r], sum);
      }
    }
  }
  __syncthreads();

  // A warp a row of the step, a lane a row of the matrix.
  if (warp >= M) return;
  const int rows = pick(a.w, product).rows, row = tile * kBlock + lane;
  const bool there = row < rows;
  const std::int64_t out = a.experts ? slot : warp, at = out * rows + row;
  const auto value = [&](int part) {
    const float* const bias = pick(a.bias, product + part);
    const float sum = ld_shared(&products[(part * kM + warp) * kBlock + lane]);
    const float scale = a.x.squares ? ld_shared(&inverse[warp]) : 1.0f;
    return fmaf(sum, scale, bias ? ld_global(bias + row) : 0.0f);
  };
  float next = 0.0f, weight = 0.0f;
  if (there) {
    if (a.end == End::Store) {
      const float y = a.scale * value(0);
      st_global(pick(a.y, product) + at, a.softcap > 0.0f ? a.softcap * tanhf(y / a.softcap) : y);
    } else if (a.end == End::Residual) {
      next = fmaf(a.scale, value(0), ld_global(a.residual + at));
      st_global(a.residual + at, next);
    } else {
      next = activate(a.activation, value(0)) * value(1);
      if (a.y[0]) st_global(a.y[0] + at, next);
    }
    weight = a.next_norm ? ld_global(a.next_norm + row) : 1.0f;
  }
  if (a.end != End::Store && a.next.digits) quantize_block(a.next, out, tile, next, weight);
}

}  // namespace ringlm::cuda

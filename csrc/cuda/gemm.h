// A product of a prefill chunk: y[m][r] (+)= scale * (steps[m] * sum over c of W[r][c] x[m][c] + bias[r]).
//
// Mapping. A block of four warps owns 64 tokens by 64 rows of the matrix and goes through the columns 64 at a
// time. A thread turns one block of 32 columns of a row into halves, which two lanes take from the same
// sector; the tokens come by cp.async. Both lie twice in shared memory, so that the next step's are on their
// way while this one's are multiplied: one barrier a step. A warp has 32 tokens, the rows of m16n8k16, by 32
// rows of the matrix, its columns: 32 sums a lane, and 32 products of tensor cores for 16 ldmatrix a step.
// Blocks that follow one another have the same rows of the matrix, so those come from L2.
//
// Floor: W once for 64 tokens (from DRAM: once; its sectors 1.1 to 1.3 times, as scales share theirs with the
// next step's), x once for 64 rows, y once (twice where it is added to).
// Shared memory: 32 KB; 16-byte chunks change places with the row, so there are no bank conflicts.
// Registers: 138 to 167, no spills: two blocks an SM of sm_75, three of sm_87.
// Shapes: any M, rows and cols; every type of pack.h. Weights are rounded to halves: what of BF16 and F32
// is beyond them becomes infinite, which check_finite finds.
#pragma once

#include "cuda/launch.h"
#include "cuda/pack.h"
#include "cuda/port.h"

namespace ringlm::cuda {

constexpr int kGemmThreads = 128;
constexpr int kGemmTile = 64;  // tokens, rows and columns of a step
constexpr std::size_t kGemmSharedBytes = 2 * 2 * kGemmTile * kGemmTile * sizeof(half);

// Where 8 columns of a row of a [64][64] tile are.
__device__ __forceinline__ int gemm_place(int row, int chunk) {
  return row * kGemmTile + ((chunk ^ row) & 7) * 8;
}

// 64 columns of 64 tokens, and zeros where there are none.
__device__ __forceinline__ void fetch_tokens(const Gemm& a, int first_token, int step, half* to) {
  const int stride = blocks_of(a.x.cols) * kBlock, chunk = static_cast<int>(threadIdx.x) % 8;
  const int column = step * kGemmTile + 8 * chunk;
#pragma unroll
  for (int i = 0; i < kGemmTile * 8 / kGemmThreads; ++i) {
    const int row = static_cast<int>(threadIdx.x) / 8 + i * (kGemmThreads / 8), token = first_token + row;
    half* const at = to + gemm_place(row, chunk);
    if (token < a.M && column < stride) {
      cp_async16(at, a.x.x + static_cast<std::int64_t>(token) * stride + column);
    } else {
      st_shared(reinterpret_cast<uint4*>(at), uint4{});
    }
  }
}

// This thread's 32 columns of one of 64 rows.
template <gguf::DType kType>
struct GemmWeights {
  half2 pairs[kBlock / 2];

  __device__ __forceinline__ void fetch(const DeviceMatrix& w, int first_row, int step) {
    const int row = first_row + static_cast<int>(threadIdx.x) / 2;
    const int block = 2 * step + static_cast<int>(threadIdx.x) % 2;
    if (row >= w.rows || block >= blocks_of(w.cols)) {
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) pairs[i] = __floats2half2_rn(0.0f, 0.0f);
    } else {
      dequantize_block<kType>(w, row, block, pairs);
    }
  }

  __device__ __forceinline__ void store(half* to) const {
    const int row = static_cast<int>(threadIdx.x) / 2, first_chunk = static_cast<int>(threadIdx.x) % 2 * 4;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint4 eight{bits_as<std::uint32_t>(pairs[4 * c]), bits_as<std::uint32_t>(pairs[4 * c + 1]),
                        bits_as<std::uint32_t>(pairs[4 * c + 2]), bits_as<std::uint32_t>(pairs[4 * c + 3])};
      st_shared(reinterpret_cast<uint4*>(to + gemm_place(row, first_chunk + c)), eight);
    }
  }
};

template <gguf::DType kType>
__global__ void __launch_bounds__(kGemmThreads, 2) gemm_tile(const Gemm a) {
  constexpr int kTileHalves = kGemmTile * kGemmTile;
  SMEM_DYN(half, staged);  // [2][tokens, rows of the matrix]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int first_token = static_cast<int>(blockIdx.x) * kGemmTile;
  const int first_row = static_cast<int>(blockIdx.y) * kGemmTile;
  const int warp_token = warp % 2 * 32, warp_row = warp / 2 * 32;  // in the tile
  const int steps = (blocks_of(a.w.cols) + 1) / 2;
  const auto tokens_of = [&](int step) { return staged + step % 2 * 2 * kTileHalves; };
  const auto rows_of = [&](int step) { return tokens_of(step) + kTileHalves; };

  float sums[2][4][4] = {};  // 16 tokens by 8 rows each
  GemmWeights<kType> weights;
  fetch_tokens(a, first_token, 0, tokens_of(0));
  cp_async_commit();
  weights.fetch(a.w, first_row, 0);
  weights.store(rows_of(0));
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<0>();
    __syncthreads();  // this step's halves are there, and those of the step before have been read
    const bool more = step + 1 < steps;
    if (more) {
      fetch_tokens(a, first_token, step + 1, tokens_of(step + 1));
      cp_async_commit();
      weights.fetch(a.w, first_row, step + 1);
    }
#pragma unroll
    for (int k = 0; k < kGemmTile / 16; ++k) {
      std::uint32_t tokens[2][4], rows[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // matrices: tokens 0-7 and 8-15 of columns 0-7, then of columns 8-15
        const int token = warp_token + 16 * i + lane / 8 % 2 * 8 + lane % 8;
        ldmatrix_x4(tokens[i], tokens_of(step) + gemm_place(token, 2 * k + lane / 16));
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {  // matrices: columns 0-7 and 8-15 of rows 0-7, then of rows 8-15
        const int row = warp_row + 16 * j + lane / 16 * 8 + lane % 8;
        ldmatrix_x4(rows[j], rows_of(step) + gemm_place(row, 2 * k + lane / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const std::uint32_t b[2] = {rows[j / 2][j % 2 * 2], rows[j / 2][j % 2 * 2 + 1]};
          mma_m16n8k16(sums[i][j], tokens[i], b);
        }
      }
    }
    if (more) weights.store(rows_of(step + 1));
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = first_token + warp_token + 8 * i + lane / 4;
    if (token >= a.M) continue;
    const float of_token = ld_global(a.x.steps + token);
    float* const y = a.y + static_cast<std::int64_t>(token) * a.w.rows;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first_row + warp_row + 8 * j + lane % 4 * 2;
      float value[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float bias = a.bias != nullptr && row + k < a.w.rows ? ld_global(a.bias + row + k) : 0.0f;
        value[k] = a.scale * (of_token * sums[i / 2][j][i % 2 * 2 + k] + bias);
      }
      if (a.w.rows % 2 == 0) {  // so is the row: both or none, aligned
        if (row >= a.w.rows) continue;
        auto* const to = reinterpret_cast<float2*>(y + row);
        const float2 before = a.add ? ld_global(to) : make_float2(0.0f, 0.0f);
        st_global(to, make_float2(before.x + value[0], before.y + value[1]));
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          if (row + k >= a.w.rows) continue;
          const float before = a.add ? ld_global(y + row + k) : 0.0f;
          st_global(y + row + k, before + value[k]);
        }
      }
    }
  }
}

}  // namespace ringlm::cuda

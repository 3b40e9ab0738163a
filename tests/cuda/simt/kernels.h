// Kernels that are right, to test the executor with; nvcc compiles them as well (kernels.cu).
#pragma once

#include "cuda/port.h"

namespace kernels {

using namespace ringlm::cuda;

// sums[block]: of x[i] over the block's share of n. Any block size that is a multiple of 32.
__global__ void block_sum(const float* x, int n, float* sums) {
  SMEM_STATIC(float, of_warp, 32);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int step = static_cast<int>(gridDim.x * blockDim.x);
  float sum = 0.0f;
  for (int i = static_cast<int>(blockIdx.x * blockDim.x) + thread; i < n; i += step) sum += ld_global(x + i);
  sum = warp_sum(sum);
  if (lane == 0) st_shared(&of_warp[warp], sum);
  __syncthreads();
  if (warp == 0) {
    sum = lane < static_cast<int>(blockDim.x) / 32 ? ld_shared(&of_warp[lane]) : 0.0f;
    sum = warp_sum(sum);
    if (lane == 0) st_global(sums + blockIdx.x, sum);
  }
}

// columns[c] = sum over r of x[r][c], r < rows, c < 4 * 64: rows go through two buffers of shared memory, the
// next one under way while this one is read by other threads than those that asked for it. 64 threads.
__global__ void column_sums(const float* x, int rows, float* columns) {
  constexpr int kColumns = 256;
  SMEM_DYN(float, staged);  // [2][256]
  const int thread = static_cast<int>(threadIdx.x), reader = 63 - thread;
  const auto fetch = [&](int row) {
    if (row < rows) cp_async16(&staged[row % 2 * kColumns + 4 * thread], x + row * kColumns + 4 * thread);
    cp_async_commit();
  };
  float sum[4] = {};
  fetch(0);
  for (int row = 0; row < rows; ++row) {
    fetch(row + 1);
    cp_async_wait<1>();
    __syncthreads();
    const float4 four = ld_shared(reinterpret_cast<const float4*>(&staged[row % 2 * kColumns + 4 * reader]));
    sum[0] += four.x;
    sum[1] += four.y;
    sum[2] += four.z;
    sum[3] += four.w;
    __syncthreads();
  }
  st_global(reinterpret_cast<float4*>(columns + 4 * reader), make_float4(sum[0], sum[1], sum[2], sum[3]));
}

// c[16][8] = a[16][k] b[8][k]^T in half, summed in float: k a multiple of 16, one warp, kDepth 8 or 16.
template <int kDepth>
__global__ void tile_product(const half* a, const half* b, float* c, int k) {
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, in_group = lane % 4;
  const auto pair = [&](const half* rows, int row, int column) {
    return ld_global(reinterpret_cast<const std::uint32_t*>(rows + row * k + column));
  };
  float sums[4] = {};
  for (int first = 0; first < k; first += kDepth) {
    const int column = first + 2 * in_group;
    if constexpr (kDepth == 8) {
      const std::uint32_t a_pairs[2] = {pair(a, group, column), pair(a, group + 8, column)};
      mma_m16n8k8(sums, a_pairs, pair(b, group, column));
    } else {
      const std::uint32_t a_pairs[4] = {pair(a, group, column), pair(a, group + 8, column),
                                        pair(a, group, column + 8), pair(a, group + 8, column + 8)};
      const std::uint32_t b_pairs[2] = {pair(b, group, column), pair(b, group, column + 8)};
      mma_m16n8k16(sums, a_pairs, b_pairs);
    }
  }
  float* const at = c + group * 8 + 2 * in_group;
  st_global(reinterpret_cast<float2*>(at), make_float2(sums[0], sums[1]));
  st_global(reinterpret_cast<float2*>(at + 64), make_float2(sums[2], sums[3]));
}

enum class Fences { kBoth, kNoRelease, kNoAcquire };

// *sum = sum of x[0 .. n): the last block to arrive adds what the blocks left in partial[], and leaves the
// counter as it was, zero.
template <Fences kFences>
__global__ void sum_by_last_block(const float* x, int n, float* partial, unsigned* arrived, float* sum) {
  SMEM_STATIC(float, of_warp, 32);
  SMEM_STATIC(unsigned, place, 1);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int i = static_cast<int>(blockIdx.x * blockDim.x) + thread;
  const float mine = warp_sum(i < n ? ld_global(x + i) : 0.0f);
  if (lane == 0) of_warp[warp] = mine;
  __syncthreads();
  if (thread == 0) {
    float total = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) total += of_warp[w];
    st_global(partial + blockIdx.x, total);
    if (kFences != Fences::kNoRelease) __threadfence();
    place[0] = atomicAdd(arrived, 1u);
    if (kFences != Fences::kNoAcquire) __threadfence();
  }
  __syncthreads();
  if (place[0] != gridDim.x - 1 || warp > 0) return;
  float total = 0.0f;
  for (int b = lane; b < static_cast<int>(gridDim.x); b += 32) total += ld_global(partial + b);
  total = warp_sum(total);
  if (lane == 0) {
    st_global(sum, total);
    st_global(arrived, 0u);
  }
}

enum class Who { kThread0, kEveryThread, kWarp };

// y[i] = sum over the blocks b of spread[b][i], i < 32, where block b has spread[b][i] = x[b] + i: by the
// last of them. What all threads of a block wrote is released by thread 0 for all, by each for itself, or, in
// blocks of one warp, by lane 0 behind __syncwarp. Blocks of 32 threads.
template <Who kReleases>
__global__ void spread_and_sum(const float* x, float* spread, unsigned* arrived, float* y) {
  SMEM_STATIC(unsigned, place, 1);
  const int i = static_cast<int>(threadIdx.x);
  st_global(spread + blockIdx.x * 32 + threadIdx.x, ld_global(x + blockIdx.x) + static_cast<float>(i));
  if (kReleases == Who::kEveryThread) __threadfence();
  if (kReleases == Who::kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  if (i == 0) {
    if (kReleases != Who::kEveryThread) __threadfence();
    place[0] = atomicAdd(arrived, 1u);
    __threadfence();
  }
  if (kReleases == Who::kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  if (place[0] != gridDim.x - 1) return;
  float sum = 0.0f;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += ld_global(spread + b * 32 + threadIdx.x);
  st_global(y + i, sum);
}

// Shared arrays of a device function: one for each instance of it, the same one in every call. y[i]: 1 if the
// two do not overlap, and 2 if a second call gave the same ones.
template <int kCount>
__device__ __forceinline__ int* scratch() {
  SMEM_STATIC(int, s, kCount);
  return s;
}
template <int kOne, int kOther>
__global__ void scratch_places(int* y) {
  int* const one = scratch<kOne>();
  int* const other = scratch<kOther>();
  const bool apart = other >= one + kOne || one >= other + kOther;
  st_global(y + threadIdx.x,
            (apart ? 1 : 0) + (scratch<kOne>() == one && scratch<kOther>() == other ? 2 : 0));
}

// One request of a warp a row: y[i] = x[first + stride * i], i < 32, of T's of any size.
template <class T>
__global__ void gather(const T* x, int first, int stride, T* y) {
  const int lane = static_cast<int>(threadIdx.x);
  st_global(y + lane, ld_global_stream(x + first + stride * lane));
}

// Writes and reads a shared array of 1024 words at stride * lane, as T's.
template <class T>
__global__ void shared_stride(int stride, T* y) {
  SMEM_STATIC(T, words, 4096 / sizeof(T));
  const int lane = static_cast<int>(threadIdx.x);
  st_shared(&words[stride * lane], T{});
  __syncwarp();
  st_global(y + lane, ld_shared(&words[stride * lane]));
}

// order[i]: the index of the thread, over all blocks, that was the i-th to come here.
__global__ void order_of_threads(unsigned* count, int* order) {
  const unsigned i = atomicAdd(count, 1u);
  st_global(order + i, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
}

// What a thread does in a step: nothing, 1 reads, 2 writes, so many bytes (1, 2 or 4) at an address.
struct Step {
  std::uint8_t op, bytes, address;
};

template <bool kShared, class T>
__device__ __forceinline__ void access(std::uint8_t op, T* at) {
  if (op == 1) {
    kShared ? ld_shared(at) : ld_global(at);
  } else if (kShared) {
    st_shared(at, T{});
  } else {
    st_global(at, T{});
  }
}

// steps[n_steps][threads] on 16 bytes of memory, and after each of them syncs[step]: nothing, 1 __syncwarp,
// or 2
// __syncthreads. In shared memory instead, once that has been written.
template <bool kShared>
__global__ void run_steps(const Step* steps, const std::uint8_t* syncs, int n_steps, std::uint8_t* memory) {
  SMEM_STATIC(std::uint8_t, shared, 16);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 16) st_shared(&shared[thread], std::uint8_t{});
  __syncthreads();
  for (int i = 0; i < n_steps; ++i) {
    const std::uint8_t* const step =
        reinterpret_cast<const std::uint8_t*>(steps + i * static_cast<int>(blockDim.x) + thread);
    const std::uint8_t op = ld_global(step), bytes = ld_global(step + 1), address = ld_global(step + 2);
    std::uint8_t* const at = (kShared ? shared : memory) + address;
    if (op != 0 && bytes == 1) access<kShared>(op, at);
    if (op != 0 && bytes == 2) access<kShared>(op, reinterpret_cast<std::uint16_t*>(at));
    if (op != 0 && bytes == 4) access<kShared>(op, reinterpret_cast<std::uint32_t*>(at));
    const std::uint8_t sync = ld_global(syncs + i);
    if (sync == 1) __syncwarp();
    if (sync == 2) __syncthreads();
  }
}

// ---- one instruction each

__global__ void ex2_of(const float* x, float* y) {
  st_global(y + threadIdx.x, ex2_approx(ld_global(x + threadIdx.x)));
}

__global__ void dp4a_of(const int* a, const int* b, const int* c, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  st_global(y + i, dp4a(ld_global(a + i), ld_global(b + i), ld_global(c + i)));
}

// Registers as they are: a[lane][k / 4], b[lane][k / 8], c[lane][4].
template <int kDepth>
__global__ void mma_registers(const std::uint32_t* a, const std::uint32_t* b, float* c) {
  const int lane = static_cast<int>(threadIdx.x);
  float sums[4];
  std::uint32_t a_pairs[kDepth / 4], b_pairs[kDepth / 8];
  for (int i = 0; i < 4; ++i) sums[i] = ld_global(c + 4 * lane + i);
  for (int i = 0; i < kDepth / 4; ++i) a_pairs[i] = ld_global(a + kDepth / 4 * lane + i);
  for (int i = 0; i < kDepth / 8; ++i) b_pairs[i] = ld_global(b + kDepth / 8 * lane + i);
  if constexpr (kDepth == 8) {
    mma_m16n8k8(sums, a_pairs, b_pairs[0]);
  } else {
    mma_m16n8k16(sums, a_pairs, b_pairs);
  }
  for (int i = 0; i < 4; ++i) st_global(c + 4 * lane + i, sums[i]);
}

__global__ void movmatrix_of(const std::uint32_t* x, std::uint32_t* y) {
  st_global(y + threadIdx.x, movmatrix_trans(ld_global(x + threadIdx.x)));
}

// y[2][lane][4]: the fragments of x [4][8][8] halves, and of their transposes; rows are `stride` halves apart
// in shared memory.
template <int kStride>
__global__ void ldmatrix_of(const half* x, std::uint32_t* y) {
  SMEM_STATIC(half, rows, 32 * kStride);
  const int lane = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 8; ++i) st_shared(&rows[lane * kStride + i], ld_global(x + 8 * lane + i));
  __syncwarp();
  std::uint32_t d[4], transposed[4];
  ldmatrix_x4(d, &rows[lane * kStride]);
  ldmatrix_x4_trans(transposed, &rows[lane * kStride]);
  for (int i = 0; i < 4; ++i) {
    st_global(y + 4 * lane + i, d[i]);
    st_global(y + 128 + 4 * lane + i, transposed[i]);
  }
}

// y[lane][6]: the four shuffles of x by `operand`, in segments of `width`; then a ballot, and a
// maximum of 8 lanes.
__global__ void shuffles_of(const int* x, int operand, int width, int* y) {
  const int lane = static_cast<int>(threadIdx.x), value = ld_global(x + lane);
  st_global(y + 6 * lane, shfl(kFullWarp, value, operand, width));
  st_global(y + 6 * lane + 1, shfl_xor(kFullWarp, value, operand, width));
  st_global(y + 6 * lane + 2, shfl_up(kFullWarp, value, operand, width));
  st_global(y + 6 * lane + 3, shfl_down(kFullWarp, value, operand, width));
  st_global(y + 6 * lane + 4, bits_as<int>(ballot(kFullWarp, value % 3 == 0)));
  st_global(y + 6 * lane + 5, warp_max<8>(value));
}

// y[lane][3]: halves of the warp vote by themselves, each of its own x; then any and all of the warp.
__global__ void votes_of(const int* x, int* y) {
  const int lane = static_cast<int>(threadIdx.x), value = ld_global(x + lane);
  std::uint32_t half_warp = 0;
  if (lane < 16) {
    half_warp = ballot(0x0000ffffu, value > 0);
  } else {
    half_warp = ballot(0xffff0000u, value > 1);
  }
  st_global(y + 3 * lane, bits_as<int>(half_warp));
  st_global(y + 3 * lane + 1, warp_any(kFullWarp, value > 2) ? 1 : 0);
  st_global(y + 3 * lane + 2, warp_all(kFullWarp, value > 0) ? 1 : 0);
}

// y[thread][3]: how many threads of the block have odd indices, whether all, whether any.
__global__ void barrier_votes(int* y) {
  const int thread = static_cast<int>(threadIdx.x + blockDim.x * threadIdx.y), odd = thread % 2;
  st_global(y + 3 * thread, __syncthreads_count(odd));
  st_global(y + 3 * thread + 1, __syncthreads_and(odd) != 0 ? 1 : 0);
  st_global(y + 3 * thread + 2, __syncthreads_or(odd) != 0 ? 1 : 0);
}

// y[0 .. 6): the results of atomics by all threads on y itself.
__global__ void atomics_of(int* y, unsigned* wrapping) {
  const int thread = static_cast<int>(threadIdx.x);
  atomicAdd(y, 1);
  atomicMax(y + 1, thread);
  atomicMin(y + 2, -thread);
  atomicCAS(y + 3, 0, 7);
  if (thread == 5) atomicExch(y + 4, 9);
  atomicInc(wrapping, 9u);
}

}  // namespace kernels

// top_k: of a row of logits the k largest, of equals the lower id.
//
// Floor, bytes a row: 4 n_vocab; each logit is read once, 16 bytes a lane wherever the address allows it.
// Mapping: up to kTopBlocks blocks a row; a block goes through its share in pieces of 4096 logits, 16 a
// thread, in registers. The last block to arrive does the same with what the others kept, at most 4096 keys.
// Choosing k of a piece: the k-th largest of the threads' maxima is a lower bound for the k-th largest of
// all, and no thread whose maximum is below it has anything above it; so at most 17 k keys are left, in all
// likelihood not many more than k, and their ranks are counted.
// Registers: at most 64. Shared memory: 12 KB. Shapes: any n_vocab that has ids of 31 bits, k to kTopLogits.
#pragma once

#include <cmath>

#include "cuda/launch.h"
#include "cuda/port.h"
#include "cuda/reduce.h"
#include "cuda/select.h"

namespace ringlm::cuda {

constexpr int kTopThreads = 256;
constexpr int kTopBlocks = 64;
constexpr int kTopPerThread = 16;
constexpr int kTopPiece = kTopThreads * kTopPerThread;
static_assert(kTopBlocks * kTopLogits <= kTopPiece && kTopLogits <= kTopThreads);

struct TopShared {
  Key maxima[kTopThreads];
  Key candidates[kTopLogits * (kTopPerThread + 1)];
  Key best[kTopLogits];  // the k largest so far, in order, zero behind the last
  Key bound;
  unsigned n_candidates;
};

// The k largest of the block's keys and of those in s.best, into s.best. Zero is no key.
__device__ __forceinline__ void keep_largest(TopShared& s, const Key (&keys)[kTopPerThread], int k) {
  const int thread = static_cast<int>(threadIdx.x);
  const Key kept = thread < k ? s.best[thread] : 0;
  Key largest = kept;
#pragma unroll
  for (int i = 0; i < kTopPerThread; ++i) largest = max(largest, keys[i]);

  if (k == 1) {
    const Key best = block_max(largest, s.maxima);
    if (thread == 0) s.best[0] = best;
    __syncthreads();
    return;
  }
  s.maxima[thread] = largest;
  if (thread == 0) {
    s.n_candidates = 0;
    s.bound = 1;
  }
  __syncthreads();
  if (thread < k) s.best[thread] = 0;
  int above = 0;
#pragma unroll 8
  for (int i = 0; i < kTopThreads; ++i) above += s.maxima[i] > largest ? 1 : 0;
  if (above == k - 1 && largest != 0) s.bound = largest;
  __syncthreads();
  const Key bound = s.bound;
  if (largest >= bound) {
    if (kept >= bound) s.candidates[atomicAdd(&s.n_candidates, 1u)] = kept;
#pragma unroll
    for (int i = 0; i < kTopPerThread; ++i) {
      if (keys[i] >= bound) s.candidates[atomicAdd(&s.n_candidates, 1u)] = keys[i];
    }
  }
  __syncthreads();
  const int n = static_cast<int>(s.n_candidates);
  for (int c = thread; c < n; c += kTopThreads) {
    const Key key = s.candidates[c];
    int rank = 0;
    for (int i = 0; i < n; ++i) rank += s.candidates[i] > key ? 1 : 0;
    if (rank < k) s.best[rank] = key;
  }
  __syncthreads();
}

// Logits first .. first + 3 of a row of n; minus infinity outside of it. row + first is 16-byte aligned.
__device__ __forceinline__ float4 four_logits(const float* row, int first, int n) {
  if (first >= 0 && first + 4 <= n) return ld_global_stream(reinterpret_cast<const float4*>(row + first));
  float four[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const bool inside = first + e >= 0 && first + e < n;
    four[e] = inside ? ld_global(row + first + e) : -INFINITY;
  }
  return make_float4(four[0], four[1], four[2], four[3]);
}

__global__ void __launch_bounds__(kTopThreads) top_k_kernel(TopK a, int pieces) {
  SMEM_STATIC(TopShared, shared, 1);
  SMEM_STATIC(unsigned, place, 1);
  TopShared& s = shared[0];
  const int thread = static_cast<int>(threadIdx.x), m = static_cast<int>(blockIdx.y);
  const int block = static_cast<int>(blockIdx.x), n_blocks = static_cast<int>(gridDim.x);
  const float* const row = a.logits + std::int64_t{m} * a.n_vocab;
  Key* const kept = reinterpret_cast<Key*>(a.scratch) + std::int64_t{m} * n_blocks * a.k;  // [n_blocks, k]
  const int lead = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) / 4 % 4);  // floats into 16 bytes
  if (thread < a.k) s.best[thread] = 0;

  Key keys[kTopPerThread];
  int bad = 0;
  for (int piece = 0; piece < pieces; ++piece) {
    const int begin = (block * pieces + piece) * kTopPiece - lead;
    if (begin >= a.n_vocab) break;
    float4 fours[kTopPerThread / 4];
    if (begin >= 0 && begin + kTopPiece <= a.n_vocab) {
      const float4* const from = reinterpret_cast<const float4*>(row + begin) + thread;
#pragma unroll
      for (int i = 0; i < kTopPerThread / 4; ++i) fours[i] = ld_global_stream(from + i * kTopThreads);
    } else {
#pragma unroll
      for (int i = 0; i < kTopPerThread / 4; ++i) {
        fours[i] = four_logits(row, begin + 4 * (i * kTopThreads + thread), a.n_vocab);
      }
    }
#pragma unroll
    for (int i = 0; i < kTopPerThread / 4; ++i) {
      const int first = begin + 4 * (i * kTopThreads + thread);
      const float x[4] = {fours[i].x, fours[i].y, fours[i].z, fours[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool inside = first + e >= 0 && first + e < a.n_vocab;
        keys[4 * i + e] = inside ? key_of(x[e], first + e) : 0;
        bad |= inside && !is_finite(x[e]) ? 1 : 0;
      }
    }
    keep_largest(s, keys, a.k);
  }

  bad = __syncthreads_or(bad);
  if (thread == 0 && bad != 0) atomicMax(a.bad + m, 1u);
  if (thread < a.k) st_global(kept + block * a.k + thread, s.best[thread]);
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    place[0] = atomicAdd(a.arrived + m, 1u);
    __threadfence();
  }
  __syncthreads();
  if (place[0] != gridDim.x - 1) return;

#pragma unroll
  for (int i = 0; i < kTopPerThread; ++i) {
    const int at = i * kTopThreads + thread;
    keys[i] = at < n_blocks * a.k ? ld_global(kept + at) : 0;
  }
  if (thread < a.k) s.best[thread] = 0;
  __syncthreads();
  keep_largest(s, keys, a.k);
  TopLogits* const out = a.out + m;
  if (thread < kTopLogits) {
    const Key key = thread < a.k ? s.best[thread] : 0;
    st_global(out->ids + thread, key != 0 ? index_of(key) : -1);
    st_global(out->logits + thread, key != 0 ? number_of(key) : 0.0f);
  }
  if (thread == 0) st_global(a.arrived + m, 0u);
}

}  // namespace ringlm::cuda

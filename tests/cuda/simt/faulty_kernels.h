// Kernels with one fault each. kFault = false is the same kernel put right: no tool may find anything in it.
// The line that has to be named ends in a comment, "// here: NAME"; test_faults.cpp looks the line up.
#pragma once

#include "cuda/port.h"

namespace faulty {

using namespace ringlm::cuda;

constexpr int kThreads = 64;

// ---- order of memory

// Two warps swap through shared memory.
template <bool kFault>
__global__ void missing_barrier(int* y) {
  SMEM_STATIC(int, s, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  s[i] = i;
  if (!kFault) __syncthreads();
  const int other = s[kThreads - 1 - i];  // here: missing_barrier
  st_global(y + i, other);
}

// Neighbours in a warp: lanes do not run in step.
template <bool kFault>
__global__ void missing_syncwarp(int* y) {
  SMEM_STATIC(int, s, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  st_shared(&s[i], i);
  if (!kFault) __syncwarp();
  const int other = ld_shared(&s[i ^ 1]);  // here: missing_syncwarp
  st_global(y + i, other);
}

// The reads are behind a barrier, the writes that follow them are not.
template <bool kFault>
__global__ void write_after_read(int* y) {
  SMEM_STATIC(int, s, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  s[i] = i;
  __syncthreads();
  const int other = s[kThreads - 1 - i];
  if (!kFault) __syncthreads();
  s[i] = other + 1;  // here: write_after_read
  st_global(y + i, s[i]);
}

template <bool kFault>
__global__ void global_race(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  st_global(y + i, i);
  if (!kFault) __syncthreads();
  const int other = ld_global(y + (kThreads - 1 - i));  // here: global_race
  __syncthreads();
  st_global(y + i, other);
}

// Two blocks write the same place.
template <bool kFault>
__global__ void blocks_race(int* y) {
  const int i = static_cast<int>(threadIdx.x + (kFault ? 0 : kThreads * blockIdx.x));
  st_global(y + i, i);  // here: blocks_race
}

template <bool kFault>
__global__ void uninitialised_shared(int* y) {
  SMEM_STATIC(int, s, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  if (!kFault || i != 40) s[i] = i;
  __syncthreads();
  st_global(y + i, s[i]);  // here: uninitialised_shared
}

// Read before cp_async_wait.
template <bool kFault>
__global__ void early_read(const int* x, int* y) {
  SMEM_STATIC(int, s, 4 * kThreads);
  const int i = static_cast<int>(threadIdx.x);
  cp_async16(&s[4 * i], x + 4 * i);
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  st_global(y + i, ld_shared(&s[4 * i]));  // here: early_read
  cp_async_wait<0>();
}

// The copy is there for the thread that asked, not yet for another.
template <bool kFault>
__global__ void copy_without_barrier(const int* x, int* y) {
  SMEM_STATIC(int, s, 4 * kThreads);
  const int i = static_cast<int>(threadIdx.x);
  cp_async16(&s[4 * i], x + 4 * i);
  cp_async_commit();
  cp_async_wait<0>();
  if (!kFault) __syncthreads();
  st_global(y + i, ld_shared(&s[4 * (kThreads - 1 - i)]));  // here: copy_without_barrier
}

template <bool kFault>
__global__ void copy_never_waited(const int* x, int* y) {
  SMEM_STATIC(int, s, 4 * kThreads);
  const int i = static_cast<int>(threadIdx.x);
  cp_async16(&s[4 * i], x + 4 * i);
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  st_global(y + i, i);
}

// ---- collectives

template <bool kFault>
__global__ void exit_before_barrier(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  if (kFault && i >= 48) return;
  __syncthreads();  // here: exit_before_barrier
  st_global(y + i, i);
}

template <bool kFault>
__global__ void two_barriers(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  if (kFault && i < 32) {
    __syncthreads();  // here: two_barriers
  } else {
    __syncthreads();  // here: two_barriers, the other
  }
  st_global(y + i, i);
}

template <bool kFault>
__global__ void divergent_shuffle(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  int value = i;
  if (kFault && i % 32 < 16) {
    value = shfl_xor(kFullWarp, value, 1);  // here: divergent_shuffle
  } else {
    value = shfl_xor(kFullWarp, value, 2);  // here: divergent_shuffle, the other
  }
  st_global(y + i, value);
}

// Half of the warp is at the barrier, the other half waits for it in a shuffle.
template <bool kFault>
__global__ void shuffle_waits_for_barrier(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  int value = i;
  if (!kFault || i % 32 < 16) value = shfl_xor(kFullWarp, value, 1);  // here: shuffle_waits_for_barrier
  __syncthreads();
  st_global(y + i, value);
}

template <bool kFault>
__global__ void mask_leaves_caller_out(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  const std::uint32_t mask = kFault ? 0x0000ffffu : kFullWarp;
  const int value = shfl_xor(mask, i, 1);  // here: mask_leaves_caller_out
  st_global(y + i, value);
}

template <bool kFault>
__global__ void masks_differ(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  const std::uint32_t mask = kFault && i % 32 == 7 ? 0x000000ffu : kFullWarp;
  const int value = shfl_xor(mask, i, 1);  // here: masks_differ
  st_global(y + i, value);
}

template <bool kFault>
__global__ void shuffle_from_absent_lane(int* y) {
  const int i = static_cast<int>(threadIdx.x);
  int value = i;
  if (i % 32 < 16) value = shfl_down(0x0000ffffu, i, 1, kFault ? 32 : 16);  // here: shuffle_from_absent_lane
  st_global(y + i, value);
}

// ---- places

// y has kThreads ints, x as many.
template <bool kFault>
__global__ void read_past_end(const int* x, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  st_global(y + i, ld_global(x + i + (kFault ? 1 : 0)));  // here: read_past_end
}

template <bool kFault>
__global__ void write_before_begin(const int* x, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  st_global(y + i - (kFault ? 1 : 0), ld_global(x + i));  // here: write_before_begin
}

template <bool kFault>
__global__ void plain_read_past_end(const int* x, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  st_global(y + i, x[i + (kFault ? 1 : 0)]);  // here: plain_read_past_end
}

template <bool kFault>
__global__ void plain_write_past_end(const int* x, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  y[i + (kFault ? 1 : 0)] = ld_global(x + i);  // here: plain_write_past_end
}

template <bool kFault>
__global__ void misaligned_vector(const int* x, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  const auto* from = reinterpret_cast<const int4*>(x + 4 * i + (kFault ? 1 : 0));
  if (i < kThreads / 4 - 1) st_global(y + i, ld_global(from).x);  // here: misaligned_vector
}

template <bool kFault>
__global__ void shared_overrun(int* y) {
  SMEM_STATIC(int, s, kThreads);
  const int i = static_cast<int>(threadIdx.x), to = kFault ? i + 1 : (i + 1) % kThreads;
  st_shared(&s[to], i);  // here: shared_overrun
  __syncthreads();
  st_global(y + i, ld_shared(&s[i]));
}

template <bool kFault>
__global__ void plain_shared_overrun(int* y) {
  SMEM_STATIC(int, s, kThreads);
  int* const p = s;
  const int i = static_cast<int>(threadIdx.x), to = kFault ? i + 1 : (i + 1) % kThreads;
  p[to] = i;  // here: plain_shared_overrun
  __syncthreads();
  st_global(y + i, p[i]);
}

// Shared memory is no global memory.
template <bool kFault>
__global__ void global_load_of_shared(const int* x, int* y) {
  SMEM_STATIC(int, s, kThreads);
  const int i = static_cast<int>(threadIdx.x);
  st_shared(&s[i], i);
  const int* const from = kFault ? &s[i] : x + i;
  st_global(y + i, ld_global(from));  // here: global_load_of_shared
}

// The load is in the code of half.h, once that is inlined here.
template <bool kFault>
__global__ void bypass_in_call(const int* x, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  const half* const h = reinterpret_cast<const half*>(x + i);
  const float value = __half2float(kFault ? *h : ld_global(h));  // here: bypass_in_call
  st_global(y + i, static_cast<int>(value));
}

// Not wrong, but not counted either.
template <bool kFault>
__global__ void bypass(const int* x, int* y) {
  const int i = static_cast<int>(threadIdx.x);
  const int value = kFault ? x[i] : ld_global(x + i);  // here: bypass
  st_global(y + i, value);
}

}  // namespace faulty

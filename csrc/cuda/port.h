// What CUDA kernels are written with: the one header that differs between nvcc and the host, and the only
// one with inline PTX. With g++ the same kernels run in the executor of tests/cuda/simt, where every
// instruction has a twin; tests/cuda/simt/test_port.cpp holds the twins against the PTX ISA manual.
//
// Rules that the executor checks, or relies on:
//   - Shared memory comes from SMEM_DYN and SMEM_STATIC, launches are LAUNCH.
//   - Global memory is read and written by ld_global, ld_global_stream and st_global, by cp_async16 and by
//     the atomics of CUDA. A call is one instruction of a warp: 1, 2, 4, 8 or 16 bytes a lane.
//   - Collectives name their mask. One stands on a source line, and none within an expression that not all
//     lanes evaluate.
//   - Only __syncwarp() and __syncthreads() order memory. Blocks never wait for one another. The last block
//     to arrive may read what others wrote: after __threadfence(), an atomic, and __threadfence() again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#else
#include "simt/builtins.h"
#include "simt/device.h"
#include "simt/half.h"
#include "simt/simt.h"
#endif

#if defined(__CUDACC__)
// T name[n], in shared memory.
#define SMEM_STATIC(T, name, n) __shared__ __align__(16) T name[n]
// T* name: the shared memory whose size the launch gives. Once a kernel.
#define SMEM_DYN(T, name)                                       \
  extern __shared__ __align__(16) unsigned char ringlm_smem_[]; \
  T* const name = reinterpret_cast<T*>(ringlm_smem_)
// kernel<<<grid, block, smem, stream>>>(...). A template with several arguments goes in parentheses.
#define LAUNCH(kernel, grid, block, smem, stream, ...) (kernel)<<<grid, block, smem, stream>>>(__VA_ARGS__)
#else
#define SMEM_STATIC(T, name, n) T(&name)[n] = *simt::static_shared<T[n]>([] {}, #name)
#define SMEM_DYN(T, name) T* const name = static_cast<T*>(simt::dynamic_shared(#name))
#define LAUNCH(kernel, grid, block, smem, stream, ...) \
  simt::launch(#kernel, kernel, grid, block, smem, stream __VA_OPT__(, ) __VA_ARGS__)
#endif

namespace ringlm::cuda {

constexpr std::uint32_t kFullWarp = 0xffffffffu;

// The source line of a call, for the executor's messages and counters; nothing on the device.
#if defined(__CUDACC__)
struct Site {
  static constexpr __host__ __device__ Site current() { return {}; }
};
#else
using simt::Site;
#endif

// Types that one instruction of a lane moves.
template <class T>
constexpr bool kOneAccess =
    (sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16) &&
    alignof(T) == sizeof(T) && std::is_trivially_copyable_v<T>;

// ---- global memory

template <class T>
__device__ __forceinline__ T ld_global(const T* from, [[maybe_unused]] Site at = Site::current()) {
  static_assert(kOneAccess<T>);
#if defined(__CUDACC__)
  return *from;
#else
  T value;
  simt::load_global(&value, from, sizeof(T), at);
  return value;
#endif
}

// ld.global.cs: read once, evicted first.
template <class T>
__device__ __forceinline__ T ld_global_stream(const T* from, [[maybe_unused]] Site at = Site::current()) {
  static_assert(kOneAccess<T>);
#if defined(__CUDACC__)
  return __ldcs(from);
#else
  return ld_global(from, at);
#endif
}

template <class T>
__device__ __forceinline__ void st_global(T* to, std::type_identity_t<T> value,
                                          [[maybe_unused]] Site at = Site::current()) {
  static_assert(kOneAccess<T>);
#if defined(__CUDACC__)
  *to = value;
#else
  simt::store_global(to, &value, sizeof(T), at);
#endif
}

// ---- shared memory: plain accesses do as well, but the executor counts bank conflicts of these alone.

template <class T>
__device__ __forceinline__ T ld_shared(const T* from, [[maybe_unused]] Site at = Site::current()) {
  static_assert(kOneAccess<T>);
#if defined(__CUDACC__)
  return *from;
#else
  T value;
  simt::load_shared(&value, from, sizeof(T), at);
  return value;
#endif
}

template <class T>
__device__ __forceinline__ void st_shared(T* to, std::type_identity_t<T> value,
                                          [[maybe_unused]] Site at = Site::current()) {
  static_assert(kOneAccess<T>);
#if defined(__CUDACC__)
  *to = value;
#else
  simt::store_shared(to, &value, sizeof(T), at);
#endif
}

// ---- cp.async (sm_80; before it, a copy at once): 16 bytes from global to shared memory, not through L1.
// They are there for the thread that issued them after cp_async_wait, for others after a barrier behind that.

__device__ __forceinline__ void cp_async16(void* to, const void* from,
                                           [[maybe_unused]] Site at = Site::current()) {
#if !defined(__CUDACC__)
  simt::copy_async(to, from, 16, at);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#else
  const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
#endif
}

// Closes the group of the copies issued since the last one.
__device__ __forceinline__ void cp_async_commit() {
#if !defined(__CUDACC__)
  simt::copy_async_commit();
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `kInFlight` of this thread's youngest groups are under way.
template <int kInFlight>
__device__ __forceinline__ void cp_async_wait() {
#if !defined(__CUDACC__)
  simt::copy_async_wait(kInFlight);
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
#endif
}

// ---- collectives of a warp. `width` cuts the warp into segments of that many lanes, as in CUDA.

template <class T>
__device__ __forceinline__ T shfl(std::uint32_t mask, T value, int lane, int width = 32,
                                  [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  return __shfl_sync(mask, value, lane, width);
#else
  return simt::shuffle(simt::Shuffle::kIndex, mask, value, lane, width, at);
#endif
}

template <class T>
__device__ __forceinline__ T shfl_xor(std::uint32_t mask, T value, int bits, int width = 32,
                                      [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(mask, value, bits, width);
#else
  return simt::shuffle(simt::Shuffle::kXor, mask, value, bits, width, at);
#endif
}

template <class T>
__device__ __forceinline__ T shfl_up(std::uint32_t mask, T value, int by, int width = 32,
                                     [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  return __shfl_up_sync(mask, value, static_cast<unsigned>(by), width);
#else
  return simt::shuffle(simt::Shuffle::kUp, mask, value, by, width, at);
#endif
}

template <class T>
__device__ __forceinline__ T shfl_down(std::uint32_t mask, T value, int by, int width = 32,
                                       [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  return __shfl_down_sync(mask, value, static_cast<unsigned>(by), width);
#else
  return simt::shuffle(simt::Shuffle::kDown, mask, value, by, width, at);
#endif
}

// Bit l: the predicate of lane l, for the lanes in the mask.
__device__ __forceinline__ std::uint32_t ballot(std::uint32_t mask, bool predicate,
                                                [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  return __ballot_sync(mask, predicate);
#else
  return simt::ballot(mask, predicate, at);
#endif
}

__device__ __forceinline__ bool warp_any(std::uint32_t mask, bool predicate,
                                         [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  return __any_sync(mask, predicate) != 0;
#else
  return simt::ballot(mask, predicate, at) != 0;
#endif
}

__device__ __forceinline__ bool warp_all(std::uint32_t mask, bool predicate,
                                         [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  return __all_sync(mask, predicate) != 0;
#else
  return simt::ballot(mask, !predicate, at) == 0;
#endif
}

// Reductions over aligned groups of kLanes lanes (a power of two) of a full warp; every lane gets the result.
template <int kLanes = 32, class T>
__device__ __forceinline__ T warp_sum(T value, Site at = Site::current()) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += shfl_xor(kFullWarp, value, step, 32, at);
  return value;
}

template <int kLanes = 32, class T>
__device__ __forceinline__ T warp_max(T value, Site at = Site::current()) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const T other = shfl_xor(kFullWarp, value, step, 32, at);
    value = other > value ? other : value;
  }
  return value;
}

// ---- tensor cores: d = a b + c of a full warp, half factors, float sums. A is [16, k] by rows, B [k, 8] by
// columns. With g = lane / 4 and t = lane % 4, registers hold two neighbours in k, the first in the low half:
//   a[i]: row g + 8 (i % 2), k = 2 t + 8 (i / 2);   b[i]: k = 2 t + 8 i, column g;
//   c[i]: row g + 8 (i / 2), column 2 t + i % 2.

__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], const std::uint32_t (&a)[2], std::uint32_t b,
                                            [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#else
  simt::mma_m16n8(c, a, 2, &b, 1, at);
#endif
}

// sm_80; before it, two products of half the depth.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[2],
                                             [[maybe_unused]] Site at = Site::current()) {
#if !defined(__CUDACC__)
  simt::mma_m16n8(c, a, 4, b, 2, at);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  mma_m16n8k8(c, {a[0], a[1]}, b[0]);
  mma_m16n8k8(c, {a[2], a[3]}, b[1]);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The transpose of an 8x8 matrix of halves; lane l holds row l / 4, columns 2 (l % 4) and the next.
__device__ __forceinline__ std::uint32_t movmatrix_trans(std::uint32_t x,
                                                         [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
#else
  return simt::movmatrix_trans(x, at);
#endif
}

// Four 8x8 matrices of halves from shared memory: lane l names the 16 bytes that are row l % 8 of matrix l /
// 8, and d[i] gets the fragment of matrix i: row lane / 4, columns 2 (lane % 4) and the next. `trans` reads
// the transpose of each. Rows of one matrix should lie in different banks.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&d)[4], const half* row,
                                            [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
#else
  simt::ldmatrix_x4(d, row, false, at);
#endif
}

__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&d)[4], const half* row,
                                                  [[maybe_unused]] Site at = Site::current()) {
#if defined(__CUDACC__)
  const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared)
               : "memory");
#else
  simt::ldmatrix_x4(d, row, true, at);
#endif
}

// ---- arithmetic

// 2^x to 22 bits; subnormal inputs and results are zero.
__device__ __forceinline__ float ex2_approx(float x) {
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return simt::ex2_approx_ftz(x);
#endif
}

// c + the sum of the four products of signed bytes.
__device__ __forceinline__ int dp4a(int a, int b, int c) {
#if defined(__CUDACC__)
  return __dp4a(a, b, c);
#else
  return simt::dp4a(a, b, c);
#endif
}

// The same bits as another type of the same size. half2 is plain bits, though it has an assignment of its
// own.
template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_destructible_v<From>);
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace ringlm::cuda

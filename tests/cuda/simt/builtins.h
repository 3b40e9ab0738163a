// The names that nvcc knows by itself: qualifiers, vector types, indices, barriers, atomics, intrinsics.
// Collectives of a warp go through csrc/cuda/port.h instead.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/device.h"

#define __global__ inline  // kernels live in headers
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct alignas(2) char2 {
  signed char x, y;
};
struct alignas(4) char4 {
  signed char x, y, z, w;
};
struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};
struct alignas(4) short2 {
  short x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace simt {
// Of the thread that runs; set at every switch.
extern uint3 thread_index, block_index;
extern dim3 block_size, grid_size;

enum class Barrier { kPlain, kCount, kAnd, kOr };
int block_barrier(Barrier kind, bool predicate, Site at);
void warp_barrier(std::uint32_t mask, Site at);
void fence();
}  // namespace simt

inline const uint3& threadIdx = simt::thread_index;
inline const uint3& blockIdx = simt::block_index;
inline const dim3& blockDim = simt::block_size;
inline const dim3& gridDim = simt::grid_size;
constexpr int warpSize = 32;

inline void __syncthreads(simt::Site at = simt::Site::current()) {
  simt::block_barrier(simt::Barrier::kPlain, false, at);
}
inline int __syncthreads_count(int predicate, simt::Site at = simt::Site::current()) {
  return simt::block_barrier(simt::Barrier::kCount, predicate != 0, at);
}
inline int __syncthreads_and(int predicate, simt::Site at = simt::Site::current()) {
  return simt::block_barrier(simt::Barrier::kAnd, predicate != 0, at);
}
inline int __syncthreads_or(int predicate, simt::Site at = simt::Site::current()) {
  return simt::block_barrier(simt::Barrier::kOr, predicate != 0, at);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, simt::Site at = simt::Site::current()) {
  simt::warp_barrier(mask, at);
}
inline void __threadfence() { simt::fence(); }
inline void __threadfence_block() {}

// ---- atomics: each returns the value before it

namespace simt {
template <class T, class Update>
T atomic(T* at_address, Update update, Site at) {
  T old;
  atomic_load(&old, at_address, sizeof(T), at);
  const T next = update(old);
  atomic_store(at_address, &next, sizeof(T));
  return old;
}
}  // namespace simt

template <class T>
T atomicAdd(T* p, std::type_identity_t<T> value, simt::Site at = simt::Site::current()) {
  return simt::atomic(p, [=](T old) { return static_cast<T>(old + value); }, at);
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> value, simt::Site at = simt::Site::current()) {
  return simt::atomic(p, [=](T old) { return std::max(old, value); }, at);
}
template <class T>
T atomicMin(T* p, std::type_identity_t<T> value, simt::Site at = simt::Site::current()) {
  return simt::atomic(p, [=](T old) { return std::min(old, value); }, at);
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> value, simt::Site at = simt::Site::current()) {
  return simt::atomic(p, [=](T) { return value; }, at);
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> value,
            simt::Site at = simt::Site::current()) {
  return simt::atomic(p, [=](T old) { return old == compare ? value : old; }, at);
}
// Counts 0, 1, ..., limit and again from 0.
inline unsigned atomicInc(unsigned* p, unsigned limit, simt::Site at = simt::Site::current()) {
  return simt::atomic(p, [=](unsigned old) { return old >= limit ? 0u : old + 1; }, at);
}

// ---- intrinsics

template <class T>
constexpr T min(T a, std::type_identity_t<T> b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, std::type_identity_t<T> b) {
  return a < b ? b : a;
}
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline float __expf(float x) { return std::exp(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

// Byte i of the result is byte (s >> 4 i) & 7 of the eight bytes y:x; bit 3 repeats that byte's sign instead.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = s >> 4 * i & 15;
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (pick & 7)) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

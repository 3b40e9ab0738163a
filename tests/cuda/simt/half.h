// half and half2 of cuda_fp16.h, as far as kernels use them. Every operation rounds once, to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "simt/builtins.h"

struct alignas(2) __half {
  _Float16 value;
};
struct alignas(4) __half2 {
  __half x, y;
};
using half = __half;
using half2 = __half2;

inline half __float2half_rn(float a) { return {static_cast<_Float16>(a)}; }
inline half __float2half(float a) { return __float2half_rn(a); }
inline float __half2float(half a) { return static_cast<float>(a.value); }
inline half __int2half_rn(int a) { return {static_cast<_Float16>(a)}; }
inline half __ushort_as_half(unsigned short bits) {
  half h;
  std::memcpy(&h, &bits, sizeof h);
  return h;
}
inline unsigned short __half_as_ushort(half h) {
  unsigned short bits;
  std::memcpy(&bits, &h, sizeof h);
  return bits;
}

inline half2 __halves2half2(half low, half high) { return {low, high}; }
inline half2 __half2half2(half a) { return {a, a}; }
inline half __low2half(half2 a) { return a.x; }
inline half __high2half(half2 a) { return a.y; }
inline half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline half2 __float22half2_rn(float2 a) { return __floats2half2_rn(a.x, a.y); }
inline float2 __half22float2(half2 a) { return {__half2float(a.x), __half2float(a.y)}; }

// Sums and products of halves are exact in double, which therefore rounds once, to half.
inline half __hadd(half a, half b) { return {static_cast<_Float16>(double(a.value) + double(b.value))}; }
inline half __hsub(half a, half b) { return {static_cast<_Float16>(double(a.value) - double(b.value))}; }
inline half __hmul(half a, half b) { return {static_cast<_Float16>(double(a.value) * double(b.value))}; }
inline half __hfma(half a, half b, half c) {
  return {static_cast<_Float16>(double(a.value) * double(b.value) + double(c.value))};
}
inline half2 __hadd2(half2 a, half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline half2 __hsub2(half2 a, half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline half2 __hmul2(half2 a, half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline half2 __hfma2(half2 a, half2 b, half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

// route: the experts of a token and their weights, as ops/route.cpp: softmax over all scores, the n_used
// largest of them, of equals the first. A warp a row; lane l has the scores of experts l + 32 j. Choosing is
// n_used maxima over keys that are all different. Floor, bytes a row: 4 n_expert in, 8 n_used out; latency is
// what it costs: about 12 shuffles for each expert chosen. Shapes: up to 512 experts.
//
// mix_experts: y = sum over a row's slots of weight * from. A thread four columns, or one where the columns
// are not a multiple of four. Floor: 4 cols (n_used + 1) a row, 4 cols more with a shared expert.
//
// Registers: at most 80, and 48. No shared memory.
#pragma once

#include "cuda/launch.h"
#include "cuda/port.h"
#include "cuda/reduce.h"
#include "cuda/select.h"

namespace ringlm::cuda {

constexpr int kMixThreads = 128;

__global__ void __launch_bounds__(32) route_kernel(Route a) {
  constexpr int kScores = kMostExperts / 32;
  const int m = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  const int n_slots = a.n_used + (a.shared != nullptr ? 1 : 0);
  std::int32_t* const experts = a.experts + std::int64_t{m} * a.n_used;
  float* const weights = a.weights + std::int64_t{m} * n_slots;
  const float* const scores = a.scores + std::int64_t{m} * a.n_expert;

  Key keys[kScores];  // 0 behind the last
  float score[kScores];
  Key first = 0;
#pragma unroll
  for (int j = 0; j < kScores; ++j) {
    const int e = lane + 32 * j;
    score[j] = e < a.n_expert ? ld_global(scores + e) : 0.0f;
    keys[j] = e < a.n_expert ? key_of(score[j], e) : 0;
    first = max(first, keys[j]);
  }
  const float largest = number_of(warp_max(first));
  float total = 0.0f;
#pragma unroll
  for (int j = 0; j < kScores; ++j) total += lane + 32 * j < a.n_expert ? expf(score[j] - largest) : 0.0f;
  total = warp_sum(total);

  // With a score that is no number there is no choice: the weights become NaN, which the step notices, and
  // the experts are any, but no two of them the same.
  if (!is_finite(total)) {
    for (int i = lane; i < a.n_used; i += 32) st_global(experts + i, i);
    for (int i = lane; i < n_slots; i += 32) st_global(weights + i, not_a_number());
    return;
  }
  Key before = ~Key{0};
  float chosen = 0.0f;
  for (int i = 0; i < a.n_used; ++i) {
    Key best = 0;
#pragma unroll
    for (int j = 0; j < kScores; ++j) best = keys[j] < before ? max(best, keys[j]) : best;
    before = warp_max(best);
    const float p = expf(number_of(before) - largest) / total;
    chosen += p;
    if (i % 32 != lane) continue;
    st_global(experts + i, index_of(before));
    st_global(weights + i, p);
  }
  for (int i = lane; a.normalize && i < a.n_used; i += 32) {  // of the lane that wrote them
    st_global(weights + i, ld_global(weights + i) / chosen);
  }
  if (a.shared == nullptr || lane != 0) return;
  const float shared = ld_global(a.shared + m);
  st_global(weights + a.n_used, is_finite(shared) ? 1.0f / (1.0f + expf(-shared)) : not_a_number());
}

// v times weight, added; T is float or float4.
__device__ __forceinline__ void add_scaled(float& sum, float weight, float v) { sum += weight * v; }
__device__ __forceinline__ void add_scaled(float4& sum, float weight, const float4& v) {
  sum.x += weight * v.x;
  sum.y += weight * v.y;
  sum.z += weight * v.z;
  sum.w += weight * v.w;
}

// cols is counted in T's.
template <class T>
__global__ void __launch_bounds__(kMixThreads)
    mix_experts_kernel(const T* from, const T* shared, const float* weights, int n_used, int cols, T* y) {
  const int m = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.x) * kMixThreads + static_cast<int>(threadIdx.x);
  if (column >= cols) return;
  const float* const w = weights + std::int64_t{m} * (n_used + (shared != nullptr ? 1 : 0));
  T sum{};
#pragma unroll 4
  for (int j = 0; j < n_used; ++j) {
    add_scaled(sum, ld_global(w + j), ld_global(from + (std::int64_t{m} * n_used + j) * cols + column));
  }
  if (shared != nullptr) {
    add_scaled(sum, ld_global(w + n_used), ld_global(shared + std::int64_t{m} * cols + column));
  }
  st_global(y + std::int64_t{m} * cols + column, sum);
}

}  // namespace ringlm::cuda

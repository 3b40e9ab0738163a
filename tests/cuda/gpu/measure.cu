// How quick single kernels are, on inputs that are in no cache: each launch reads another copy of them.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "cuda/region.h"
#include "cuda/runtime.h"
#include "gguf/types.h"
#include "gpu/gpu.h"
#include "ringlm/config.h"

namespace gpu {
namespace {

using namespace ringlm;
using namespace ringlm::cuda;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// What of a launch is printed. bytes: those that it has to move, at least.
struct Work {
  std::string name;
  double bytes, flops;
};

// Device memory with numbers in it: floats and halves that are small, codes that are any.
class Random {
 public:
  template <class T>
  T* take(std::size_t n, const std::vector<T>& values = {}) {
    memory_.emplace_back(n * sizeof(T), "a measurement");
    std::vector<T> all = values;
    if (all.empty()) all = some<T>(n);
    check(cudaMemcpy(memory_.back().data(), all.data(), n * sizeof(T), cudaMemcpyHostToDevice),
          "a measurement");
    return memory_.back().as<T>();
  }
  // Large ones: a pattern, over and over. 0x2c2c is a half of 0.065.
  std::uint8_t* bytes(std::size_t n) {
    memory_.emplace_back(n, "a measurement");
    check(cudaMemset(memory_.back().data(), 0x2c, n), "a measurement");
    return memory_.back().data();
  }

 private:
  template <class T>
  std::vector<T> some(std::size_t n) {
    std::vector<T> values(n);
    if constexpr (std::is_same_v<T, float>) {
      std::normal_distribution<float> normal;
      for (float& x : values) x = normal(random_);
    }
    return values;
  }
  std::vector<DeviceMemory> memory_;
  std::mt19937 random_{1};
};

struct Bench {
  DeviceInfo device = device_info();
  StreamHandle stream;

  // Copies of an input of that many bytes such that it has left the cache when its turn comes again.
  int copies(double bytes) const {
    const double all = std::max(64e6, 4.0 * static_cast<double>(device.l2_bytes));
    return static_cast<int>(std::clamp(all / bytes, 1.0, 256.0)) + 1;
  }

  // Seconds of one launch: the best of five runs, each of some milliseconds, as a graph is launched.
  void run(const Work& work, int n_copies, const std::function<void(int)>& launch) {
    launch(0);
    stream.synchronize(work.name.c_str());
    const int turns = std::max(1, 200 / n_copies) * n_copies;
    const Graph graph(stream.get(), [&] {
      for (int i = 0; i < turns; ++i) launch(i % n_copies);
    });
    double best = 1e30;
    for (int round = 0; round < 6; ++round) {  // the first one warms up
      Event first(Event::Timing::On), second(Event::Timing::On);
      first.record(stream.get());
      graph.launch(stream.get());
      second.record(stream.get());
      second.wait(work.name.c_str());
      if (round > 0) best = std::min(best, second.ms_since(first) / 1e3 / turns);
    }
    std::printf("{\"name\": \"%s\", \"bytes\": %.0f, \"flops\": %.0f, \"seconds\": %.9f}\n",
                work.name.c_str(), work.bytes, work.flops, best);
    std::fflush(stdout);
  }
};

void copy(Bench& b) {
  constexpr std::size_t kBytes = 64 << 20;
  Random memory;
  std::uint8_t *const from = memory.bytes(2 * kBytes), *const to = memory.bytes(2 * kBytes);
  b.run({"copy", 2.0 * kBytes, 0}, 2, [&](int i) {
    check(cudaMemcpyAsync(to + size(i) * kBytes, from + size(i) * kBytes, kBytes, cudaMemcpyDeviceToDevice,
                          b.stream.get()),
          "copy");
  });
}

// Of a row of `cols`, M times.
Quantized quantized(Random& memory, int cols, int M) {
  return {memory.take<std::int8_t>(Quantized::digit_bytes(cols, M)),
          memory.take<float4>(Quantized::scale_bytes(cols, M) / sizeof(float4)),
          memory.take<float>(Quantized::square_bytes(cols, M) / sizeof(float)), cols};
}

void product(Bench& b, gguf::DType type, int rows, int cols, int M) {
  Random memory;
  const std::size_t bytes = packed_bytes(type, rows, cols);
  const int n = b.copies(static_cast<double>(bytes));
  const std::uint8_t* const weights = memory.bytes(size(n) * bytes);
  Gemv a{};
  a.w[0] = {type, rows, cols, weights, 0};
  a.n = 1, a.M = M, a.scale = 1.0f, a.end = End::Store, a.norm_eps = 1e-5f;
  a.x = quantized(memory, cols, M);
  a.y[0] = memory.take<float>(size(M) * size(rows));
  const std::string name = "gemv " + std::string(gguf::traits(type).name) + " " + std::to_string(rows) + "x" +
                           std::to_string(cols) + " M=" + std::to_string(M);
  b.run({name, static_cast<double>(bytes), 2.0 * rows * cols * M}, n, [&](int i) {
    a.w[0].data = weights + size(i) * bytes;
    gemv(a, b.stream.get());
  });
}

void large_product(Bench& b, gguf::DType type, int rows, int cols, int M) {
  Random memory;
  const std::size_t bytes = packed_bytes(type, rows, cols);
  Gemm a{};
  a.w = {type, rows, cols, memory.bytes(bytes), 0};
  a.x = {memory.take<half>(size(M) * size(blocks_of(cols)) * kBlock), memory.take<float>(size(M)), cols};
  a.M = M, a.scale = 1.0f;
  a.y = memory.take<float>(size(M) * size(rows));
  const std::string name = "gemm " + std::string(gguf::traits(type).name) + " " + std::to_string(rows) + "x" +
                           std::to_string(cols) + " M=" + std::to_string(M);
  const double moved = static_cast<double>(bytes) + 2.0 * M * cols + 4.0 * M * rows;
  b.run({name, moved, 2.0 * rows * cols * M}, 1, [&](int) { gemm(a, b.stream.get()); });
}

// Eight KV heads of a group of four. M = 1: decode; more: a prefill.
void attention(Bench& b, KvFormat format, int head_dim, std::int64_t n_ctx, int M) {
  constexpr int kHeads = 8, kGroup = 4;
  Random memory;
  Config c;
  c.n_head = kHeads * kGroup, c.n_head_kv = kHeads, c.head_dim = head_dim;
  const std::int64_t capacity = n_ctx + M - 1;
  const std::size_t row = size(head_dim) * element_bytes(format), rows = kHeads * size(capacity);
  const std::size_t scales = format == KvFormat::Int8 ? 2 : 0;
  const double bytes = 2.0 * kHeads * static_cast<double>(n_ctx) * static_cast<double>(row + scales);
  const int n = M > 1 ? 1 : b.copies(bytes);
  std::vector<KvLayer> layers;
  for (int i = 0; i < n; ++i) {
    layers.push_back({memory.bytes(rows * row), memory.bytes(rows * row), memory.bytes(rows * 2),
                      memory.bytes(rows * 2), n_ctx, 0, capacity});
  }
  Attend a{};
  const KvLayer* const on_device = memory.take<KvLayer>(size(n), layers);
  std::vector<DeviceRow> positions;
  for (int m = 0; m < M; ++m) positions.push_back({n_ctx - M + m, std::int64_t{1} << 40, on_device, 0});
  a.rows = memory.take<DeviceRow>(size(M), positions);
  a.M = M, a.n_head = c.n_head, a.n_head_kv = kHeads, a.head_dim = head_dim;
  a.k_format = a.v_format = format;
  a.scale = 0.1f;
  const std::size_t floats = size(M) * size(c.n_head) * size(head_dim);
  a.q = memory.take<float>(floats), a.q_pinned = memory.take<float>(floats);
  a.att = memory.take<float>(floats);
  a.splits = attend_splits(c, b.device.n_sm);
  if (M == 1) {
    a.out = quantized(memory, c.n_head * head_dim, M);
    a.out.squares = nullptr;
    a.partial = memory.take<float>(attend_partial_floats(a));
    a.arrived = memory.take<unsigned>(kHeads);
  }
  const std::string name = std::string(M > 1 ? "prefill_attention " : "attend ") +
                           (format == KvFormat::Int8 ? "int8" : "f16") + " head " + std::to_string(head_dim) +
                           " depth " + std::to_string(n_ctx) + " M=" + std::to_string(M);
  const double flops = 4.0 * c.n_head * head_dim * M * (static_cast<double>(n_ctx) - M / 2.0);
  b.run({name, bytes, flops}, n, [&](int i) {
    a.layer = i;
    M > 1 ? prefill_attention(a, b.stream.get()) : attend(a, b.stream.get());
  });
}

void largest_logits(Bench& b, int n_vocab, int k) {
  Random memory;
  TopK a{};
  const int n = b.copies(4.0 * n_vocab);
  const float* const logits = memory.take<float>(size(n) * size(n_vocab));
  a.M = 1, a.n_vocab = n_vocab, a.k = k;
  a.out = memory.take<TopLogits>(1);
  a.scratch = memory.take<std::byte>(top_k_scratch_bytes(a));
  a.arrived = memory.take<unsigned>(1);
  a.bad = memory.take<std::uint32_t>(1);
  b.run({"top_k " + std::to_string(k) + " of " + std::to_string(n_vocab), 4.0 * n_vocab, 0}, n, [&](int i) {
    a.logits = logits + size(i) * size(n_vocab);
    top_k(a, b.stream.get());
  });
}

}  // namespace

void measure() {
  use_device(0);
  Bench b;
  copy(b);
  using enum gguf::DType;
  for (const gguf::DType type : {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32}) {
    product(b, type, 4096, 4096, 1);
  }
  product(b, Q4_K, 14336, 4096, 1);
  product(b, Q4_K, 4096, 14336, 1);
  product(b, Q4_K, 576, 576, 1);  // of a small model: how long a launch takes
  for (const int M : {2, 4, 8}) product(b, Q4_K, 4096, 4096, M);
  for (const KvFormat format : {KvFormat::F16, KvFormat::Int8}) {
    attention(b, format, 128, 512, 1);
    attention(b, format, 128, 8192, 1);
    attention(b, format, 64, 8192, 1);
    attention(b, format, 128, 2048, 512);
  }
  largest_logits(b, 128256, 1);
  largest_logits(b, 128256, 40);
  for (const gguf::DType type : {Q4_0, Q4_K, Q6_K, F16}) large_product(b, type, 4096, 4096, 512);
  large_product(b, Q4_K, 14336, 4096, 128);
}

}  // namespace gpu

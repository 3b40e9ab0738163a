// Bytes that decode attention and gemv move, as the executor counts them: a JSON object a line, for
// benchmarks/cuda_static. Attention over 4,096 tokens; products of the columns of 7B models, 64 rows of them.
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/gemm.h"
#include "cuda/prefill_attention.h"
#include "cuda/region.h"
#include "matrices.h"
#include "quantized.h"

using namespace ringlm;
using namespace ringlm::cuda;

namespace {

constexpr std::int32_t kTokens = 4096, kKvHeads = 2, kRows = 64;

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

const char* name(simt::Op op) {
  constexpr const char* kNames[] = {"global load", "global store", "global atomic", "shared load",
                                    "shared store"};
  return kNames[static_cast<int>(op)];
}

// `what`: a member of the object that names the case. floor: bytes as the file or the cache has them.
// operands: of the inputs and outputs in float32.
void print(const std::string& what, std::size_t floor, std::size_t operands) {
  const simt::Report report = simt::report();
  std::printf("{%s, \"floor\": %zu, \"operands\": %zu, \"buffers\": [", what.c_str(), floor, operands);
  const char* comma = "";
  for (const simt::BufferCount& b : report.buffers) {
    std::printf(
        "%s{\"name\": \"%s\", \"bytes_read\": %ju, \"unique_read\": %ju, \"unique_written\": %ju, "
        "\"sectors_read\": %ju}",
        comma, b.name.c_str(), std::uintmax_t{b.bytes_read}, std::uintmax_t{b.unique_read},
        std::uintmax_t{b.unique_written}, std::uintmax_t{b.sectors_read});
    comma = ", ";
  }
  std::printf("], \"lines\": [");
  comma = "";
  for (const simt::LineCount& l : report.lines) {
    std::printf(
        "%s{\"at\": \"%s:%d\", \"op\": \"%s\", \"requests\": %ju, \"bytes\": %ju, \"sectors\": %ju, "
        "\"least_sectors\": %ju, \"wavefronts\": %ju, \"least_wavefronts\": %ju}",
        comma, l.file.c_str(), l.line, name(l.op), std::uintmax_t{l.requests}, std::uintmax_t{l.bytes},
        std::uintmax_t{l.sectors}, std::uintmax_t{l.least_sectors}, std::uintmax_t{l.wavefronts},
        std::uintmax_t{l.least_wavefronts});
    comma = ", ";
  }
  std::printf("]}\n");
}

void count_attention(KvFormat format, int head_dim, int group, int n_sm, std::mt19937& random) {
  const bool int8 = format == KvFormat::Int8;
  const int n_head = kKvHeads * group, width = n_head * head_dim;
  const std::size_t rows = size(kKvHeads) * size(kTokens), row_bytes = size(head_dim) * element_bytes(format);
  const auto bytes = [&] {
    std::vector<std::uint8_t> all(rows * row_bytes);
    // Halves below 2, and codes of any value.
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = static_cast<std::uint8_t>(random()) & (!int8 && i % 2 == 1 ? 0xbf : 0xff);
    return all;
  };
  const auto scales = [&] {
    std::vector<std::uint16_t> all(int8 ? rows : 0, f32_to_f16(0.01f));
    return all;
  };
  simt::Buffer<std::uint8_t> k("k", bytes()), v("v", bytes());
  simt::Buffer<std::uint16_t> k_scales("k scales", scales()), v_scales("v scales", scales());
  simt::Buffer<KvLayer> layer(
      "layer",
      {KvLayer{k.data(), v.data(), int8 ? reinterpret_cast<std::uint8_t*>(k_scales.data()) : nullptr,
               int8 ? reinterpret_cast<std::uint8_t*>(v_scales.data()) : nullptr, kTokens, 0, kTokens}});
  simt::Buffer<DeviceRow> row("row", {DeviceRow{kTokens - 1, kTokens, layer.data(), 0}});
  const std::vector<float> query = quantized::random_floats(size(width), random);
  simt::Buffer<float> q("q", query), q_pinned("q_pinned", query), att("att", size(width));
  quantized::Rows out("out", 1, width);
  Config c{};
  c.n_head_kv = kKvHeads;
  Attend a{};
  a.rows = row.data();
  a.M = 1;
  a.q = q.data();
  a.q_pinned = q_pinned.data();
  a.n_head = n_head;
  a.n_head_kv = kKvHeads;
  a.head_dim = head_dim;
  a.k_format = a.v_format = format;
  a.scale = 0.01f;
  a.att = att.data();
  a.out = out.of(false);
  a.splits = attend_splits(c, n_sm);
  simt::Buffer<float> partial("partial", attend_partial_floats(a));
  simt::Buffer<unsigned> arrived("arrived", std::vector<unsigned>(size(kKvHeads), 0u));
  a.partial = partial.data();
  a.arrived = arrived.data();
  simt::reset_report();
  attend(a, nullptr);
  print("\"attend\": {\"format\": \"" + std::string(int8 ? "int8" : "f16") +
            "\", \"head_dim\": " + std::to_string(head_dim) + ", \"group\": " + std::to_string(group) +
            ", \"sms\": " + std::to_string(n_sm) + "}",
        2 * rows * (row_bytes + scale_bytes(format)), 2 * size(width) * sizeof(float));
}

void count_product(gguf::DType type, int cols, int M, std::mt19937& random) {
  const std::vector<std::uint8_t> file = matrices::random_rows(type, kRows, cols, random);
  const matrices::Packed weights("weights", type, kRows, cols, file);
  quantized::Rows in("input", M, cols);
  const std::vector<float> x = quantized::random_floats(size(M * cols), random);
  in.fill(x, x);
  simt::Buffer<float> y("y", size(M * kRows));
  Gemv a{};
  a.w[0] = weights.matrix;
  a.n = 1;
  a.x = in.of(true);
  a.M = M;
  a.end = End::Store;
  a.y[0] = y.data();
  a.scale = 1.0f;
  simt::reset_report();
  gemv(a, nullptr);
  print("\"gemv\": {\"type\": \"" + std::string(gguf::traits(type).name) +
            "\", \"cols\": " + std::to_string(cols) + ", \"rows\": " + std::to_string(kRows) +
            ", \"M\": " + std::to_string(M) + "}",
        file.size(), size(M * (cols + kRows)) * sizeof(float));
}

}  // namespace

int main() {
  // What launches give in dynamic shared memory, most of it where it depends on the model.
  std::printf("{\"dynamic\": {\"gemm_tile\": %zu, \"rope_append_kernel\": %zu", kGemmSharedBytes,
              8 * 256 * sizeof(float));
  std::printf(", \"prefill_attention_kernel<64>\": %zu", PrefillShape<64>::kSharedBytes);
  std::printf(", \"prefill_attention_kernel<80>\": %zu", PrefillShape<80>::kSharedBytes);
  std::printf(", \"prefill_attention_kernel<96>\": %zu", PrefillShape<96>::kSharedBytes);
  std::printf(", \"prefill_attention_kernel<128>\": %zu", PrefillShape<128>::kSharedBytes);
  std::printf(", \"prefill_attention_kernel<256>\": %zu}}\n", PrefillShape<256>::kSharedBytes);

  std::mt19937 random(1);
  for (const int n_sm : {8, 40}) {  // Orin Nano, T4
    for (const KvFormat format : {KvFormat::Int8, KvFormat::F16}) {
      for (const int head_dim : {64, 128, 256}) {
        for (const int group : {1, 4, 7, 8, 16}) count_attention(format, head_dim, group, n_sm, random);
      }
    }
  }
  for (const gguf::DType type : matrices::kTypes) {
    for (const int cols : {4096, 14336}) {
      for (const int M : {1, 8}) count_product(type, cols, M, random);
    }
  }
}

// Weights in device memory are those of the file; where that cannot be, nothing is kept.
#include "cuda/load.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "../cpp/tiny_model.h"
#include "fresh.h"
#include "gguf/file.h"
#include "gguf/mapping.h"
#include "matrices.h"
#include "model/config.h"
#include "ringlm/error.h"

using namespace ringlm;
using namespace ringlm::cuda;

namespace {

// Weights by hand, in a mapped file: layers of many types, one of them with experts.
class Model {
 public:
  Weights w;

  explicit Model(gguf::DType odd = gguf::DType::Q5_K, int n_vocab = 61) {
    using enum gguf::DType;
    path_ = std::filesystem::temp_directory_path() / ("ringlm-load-" + std::to_string(::getpid()));
    w.layers.resize(2);
    w.token_embd = matrix(Q6_K, n_vocab);
    w.head = w.token_embd;
    w.tied = true;
    w.output_norm = vector(kCols);
    LayerWeights& a = w.layers[0];
    a.attn_norm = vector(kCols), a.ffn_norm = vector(kCols);
    a.q = matrix(Q4_K, 48), a.k = matrix(Q4_K, 18), a.v = matrix(odd, 18), a.out = matrix(Q8_0, 256);
    a.q_bias = vector(48), a.k_bias = vector(18), a.v_bias = vector(18);
    a.q_norm = vector(6), a.k_norm = vector(6);
    a.ff = network(Q4_0, 37);
    a.ff.up_bias = vector(37);
    LayerWeights& b = w.layers[1];
    b.attn_post_norm = vector(kCols), b.ffn_post_norm = vector(kCols), b.out_bias = vector(256);
    b.q = matrix(F16, 48), b.k = matrix(BF16, 18), b.v = matrix(Q5_0, 18), b.out = matrix(Q5_1, 256);
    b.router = matrix(F32, 3);
    for (int i = 0; i < 3; ++i) b.experts.push_back(network(Q4_1, 10));  // not whole groups of rows
    b.experts.push_back(network(Q8_0, 12));
    b.shared_gate = vector(kCols);
    std::ofstream(path_, std::ios::binary).write(bytes_.data(), static_cast<std::streamsize>(bytes_.size()));
    mapping_.emplace(path_);
    const auto locate = [&](Matrix& m) {
      m.data = mapping_->bytes().subspan(m.index, static_cast<std::size_t>(m.rows) * m.row_bytes);
    };
    for (Matrix* m : {&w.token_embd, &w.head}) locate(*m);
    for (LayerWeights& l : w.layers) {
      for (Matrix* m : {&l.q, &l.k, &l.v, &l.out, &l.router}) locate(*m);
      for (Matrix* m : {&l.ff.gate, &l.ff.up, &l.ff.down}) locate(*m);
      for (FeedForward& n : l.experts) locate(n.gate), locate(n.up), locate(n.down);
    }
  }
  ~Model() { std::filesystem::remove(path_); }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Bytes of the file that are in this process's memory.
  std::size_t resident() const {
    std::ifstream in("/proc/self/smaps");
    bool here = false;
    std::size_t kib = 0;
    for (std::string line; std::getline(in, line);) {
      if (line.find(path_.string()) != std::string::npos) here = true;
      if (here && std::sscanf(line.c_str(), "Rss: %zu", &kib) == 1) break;
    }
    return kib * 1024;
  }

 private:
  static constexpr int kCols = 256;

  Matrix matrix(gguf::DType type, int rows) {
    Matrix m;
    m.type = type, m.rows = rows, m.cols = kCols;
    m.row_bytes = matrices::row_bytes(type, kCols);
    m.index = bytes_.size();  // until the file is there
    if (can_pack(type)) {
      const std::vector<std::uint8_t> file = matrices::random_rows(type, rows, kCols, random_);
      bytes_.append(reinterpret_cast<const char*>(file.data()), file.size());
    } else {
      bytes_.append(static_cast<std::size_t>(rows) * m.row_bytes, 'x');
    }
    return m;
  }
  Vector vector(int n) {
    Vector v(static_cast<std::size_t>(n));
    for (float& x : v) x = std::normal_distribution<float>()(random_);
    return v;
  }
  FeedForward network(gguf::DType type, int n_ff) {
    FeedForward n;
    n.gate = matrix(type, n_ff), n.up = matrix(type, n_ff), n.down = matrix(type, 64);
    return n;
  }

  std::mt19937 random_{5};
  std::filesystem::path path_;
  std::string bytes_;
  std::optional<gguf::Mapping> mapping_;
};

// As pack() makes it in one go, of expert `e`.
void check_matrix(const Matrix& m, const DeviceMatrix& d, std::size_t e = 0) {
  REQUIRE(d.type == m.type);
  REQUIRE(d.rows == m.rows);
  REQUIRE(d.cols == m.cols);
  if (m.rows == 0) return;
  CHECK(reinterpret_cast<std::uintptr_t>(d.data) % 256 == 0);
  CHECK(d.expert_stride % 256 == 0);
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(m.data.data());
  matrices::Packed expected("expected", m.type, m.rows, m.cols, {bytes, bytes + m.data.size()});
  CHECK(std::memcmp(d.data + e * d.expert_stride, expected.data.data(), expected.data.size()) == 0);
}

void check_vector(const Vector& v, const float* d) {
  REQUIRE((d == nullptr) == v.empty());
  if (!v.empty()) CHECK(std::memcmp(d, v.data(), v.size() * sizeof(float)) == 0);
}

void check_network(const FeedForward& n, const DeviceNetwork& d) {
  check_matrix(n.gate, d.gate);
  check_matrix(n.up, d.up);
  check_matrix(n.down, d.down);
  check_vector(n.gate_bias, d.gate_bias);
  check_vector(n.up_bias, d.up_bias);
  check_vector(n.down_bias, d.down_bias);
}

void check_layer(const LayerWeights& l, const DeviceLayer& d) {
  check_matrix(l.q, d.q);
  check_matrix(l.k, d.k);
  check_matrix(l.v, d.v);
  check_matrix(l.out, d.out);
  check_vector(l.attn_norm, d.attn_norm);
  check_vector(l.q_bias, d.q_bias);
  check_vector(l.k_bias, d.k_bias);
  check_vector(l.v_bias, d.v_bias);
  check_vector(l.q_norm, d.q_norm);
  check_vector(l.k_norm, d.k_norm);
  check_vector(l.out_bias, d.out_bias);
  check_vector(l.attn_post_norm, d.attn_post_norm);
  check_vector(l.ffn_norm, d.ffn_norm);
  check_vector(l.ffn_post_norm, d.ffn_post_norm);
  check_network(l.ff, d.ff);
  check_matrix(l.router, d.router);
  for (std::size_t e = 0; e < static_cast<std::size_t>(l.router.rows); ++e) {
    check_matrix(l.experts[e].gate, d.experts.gate, e);
    check_matrix(l.experts[e].up, d.experts.up, e);
    check_matrix(l.experts[e].down, d.experts.down, e);
  }
  if (l.shared_gate.empty()) {
    CHECK(d.shared_gate.rows == 0);
    return;
  }
  check_network(l.experts.back(), d.shared);
  Matrix row;
  row.rows = 1, row.cols = static_cast<std::int32_t>(l.shared_gate.size());
  row.data = std::as_bytes(std::span(l.shared_gate));
  check_matrix(row, d.shared_gate);
}

void check_all(const Weights& w, const DeviceWeights& d) {
  check_matrix(w.token_embd, d.token_embd);
  check_matrix(w.head, d.head);
  CHECK((d.head.data == d.token_embd.data) == w.tied);
  check_vector(w.output_norm, d.output_norm);
  REQUIRE(d.layers.size() == w.layers.size());
  REQUIRE(d.memory.size() == w.layers.size() + 1);
  for (std::size_t i = 0; i < w.layers.size(); ++i) check_layer(w.layers[i], d.layers[i]);
}

}  // namespace

TEST_CASE("every matrix and vector arrives, in pieces of any size, however late copies run") {
  const Fresh fresh;
  const Model model;
  // Four rows of F32 are the least; then pieces that end inside of matrices; then all of each in one.
  for (const auto& [staging, late] : {std::pair{1, true}, {6000, true}, {6000, false}, {1 << 20, true}}) {
    CAPTURE(staging);
    simt::runtime().late = late;
    const DeviceWeights d = load_weights(model.w, {static_cast<std::size_t>(staging)});
    check_all(model.w, d);
    CHECK(d.nbytes == device_weight_bytes(model.w));
    CHECK(simt::live().device_bytes - fresh.before.device_bytes == d.nbytes);
    CHECK(simt::live().pinned_buffers == fresh.before.pinned_buffers);
  }
}

TEST_CASE("a model's file") {
  const Fresh fresh;
  const tiny::File file;
  const gguf::File gguf = gguf::File::open(file.path());
  const Weights w = bind_weights(gguf, read_config(gguf));
  check_all(w, load_weights(w));
  check_all(w, load_weights(w));  // from the file, after its pages were dropped
}

TEST_CASE("the file's pages leave memory") {
  const Fresh fresh;
  const Model model(gguf::DType::Q5_K, 4000);  // a read maps up to 64 KiB around it again, here and there
  REQUIRE(load_weights(model.w).layers.size() == 2);  // all has been read
  const std::size_t table = model.w.token_embd.data.size();
  const auto bytes = std::as_bytes(model.w.token_embd.data);
  REQUIRE(std::count(bytes.begin(), bytes.end(), std::byte{1}) > 0);
  const std::size_t before = model.resident();
  REQUIRE(before >= table);
  load_weights(model.w);
  CHECK(model.resident() < before / 2);
}

TEST_CASE("too little memory is found before any is taken") {
  const Fresh fresh;
  const Model model;
  const std::size_t needed = device_weight_bytes(model.w) + (1 << 16);
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  simt::runtime().others_bytes = free - needed + 1;
  const std::string message = message_of<OutOfMemory>([&] { load_weights(model.w, {1 << 16}); });
  CHECK(message.find("KiB of memory on the GPU, but only") != std::string::npos);
  CHECK(message.find("of 1.00 GiB is available on SIMT executor") != std::string::npos);
  CHECK(message.find("ringlm quantize") != std::string::npos);
  fresh.check_nothing_kept();
  simt::runtime().others_bytes -= 1;
  check_all(model.w, load_weights(model.w, {1 << 16}));
}

TEST_CASE("a call that fails keeps nothing") {
  const Fresh fresh;
  const Model model;
  const auto fails = [&](const char* function, int nth, cudaError_t error) {
    CAPTURE(function);
    CAPTURE(nth);
    simt::reset_runtime();
    simt::runtime().late = true;
    simt::fail_call(function, nth, error);
    const std::string message = message_of<Error>([&] { load_weights(model.w, {6000}); });
    CHECK(message.find(cudaGetErrorName(error)) != std::string::npos);
    const bool says_where =
        message.find("weights") != std::string::npos || message.find("in pack:") != std::string::npos;
    CHECK(says_where);
    simt::reset_runtime();
    fresh.check_nothing_kept();
  };
  for (const int nth : {1, 2, 3, 4}) fails("cudaMalloc", nth, cudaErrorMemoryAllocation);
  for (const int nth : {1, 2}) fails("cudaHostAlloc", nth, cudaErrorMemoryAllocation);
  for (const int nth : {1, 7, 40}) fails("cudaMemcpyAsync", nth, cudaErrorIllegalAddress);
  fails("cudaLaunchKernel", 3, cudaErrorLaunchOutOfResources);
  fails("cudaEventSynchronize", 9, cudaErrorECCUncorrectable);
  fails("cudaStreamSynchronize", 1, cudaErrorLaunchFailure);
}

TEST_CASE("a type without kernels") {
  const Fresh fresh;
  const Model model(gguf::DType::Q2_K);
  const std::string message = message_of<UnsupportedModelError>([&] { load_weights(model.w); });
  CHECK(message.find(
            "of type Q2_K, which the CUDA backend does not compute with; it does with F32, F16, Q4_0") !=
        std::string::npos);
  CHECK(message.find("ringlm quantize") != std::string::npos);
}

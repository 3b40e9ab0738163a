// A small llama model with pseudo-random float32 weights, written as a GGUF file by hand.
#pragma once

#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ringlm/config.h"

namespace tiny {

inline ringlm::Config config() {
  ringlm::Config c;
  c.n_vocab = 61;
  c.n_embd = 40;
  c.n_layer = 3;
  c.n_head = 6;
  c.n_head_kv = 2;
  c.head_dim = 20;
  c.n_ff = 50;
  c.n_ctx_train = 300;
  c.rope_dims = 20;
  return c;
}

// Uniform in [-1, 1).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 2 + 1) {}
  float operator()() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<std::int32_t>(state_ >> 32)) * 0x1p-31f;
  }

 private:
  std::uint64_t state_;
};

using Edit = std::function<void(const std::string& tensor, std::vector<float>& values)>;

// A file that goes when this does. `edit` may change the values of any tensor.
class File {
 public:
  explicit File(const ringlm::Config& c = config(), const Edit& edit = {}) {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("ringlm-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++) + ".gguf");
    text("general.architecture", "llama");
    number("context_length", c.n_ctx_train);
    number("embedding_length", c.n_embd);
    number("block_count", c.n_layer);
    number("feed_forward_length", c.n_ff);
    number("attention.head_count", c.n_head);
    number("attention.head_count_kv", c.n_head_kv);
    number("attention.key_length", c.head_dim);
    number("attention.value_length", c.head_dim);
    number("rope.dimension_count", c.rope_dims);
    key("llama.attention.layer_norm_rms_epsilon", 6);
    put(keys_, c.norm_eps);

    const auto matrix = [&](const std::string& name, int rows, int cols) {
      tensor(name, {cols, rows}, 1.5f / std::sqrt(static_cast<float>(cols)), 0.0f, edit);
    };
    const auto vector = [&](const std::string& name, int n, float centre) {
      tensor(name, {n}, 0.3f, centre, edit);
    };
    matrix("token_embd.weight", c.n_vocab, c.n_embd);
    for (int i = 0; i < c.n_layer; ++i) {
      const std::string p = "blk." + std::to_string(i) + ".";
      vector(p + "attn_norm.weight", c.n_embd, 1.0f);
      matrix(p + "attn_q.weight", c.q_dim(), c.n_embd);
      matrix(p + "attn_k.weight", c.kv_dim(), c.n_embd);
      matrix(p + "attn_v.weight", c.kv_dim(), c.n_embd);
      vector(p + "attn_k.bias", c.kv_dim(), 0.0f);
      matrix(p + "attn_output.weight", c.n_embd, c.q_dim());
      vector(p + "ffn_norm.weight", c.n_embd, 1.0f);
      matrix(p + "ffn_gate.weight", c.n_ff, c.n_embd);
      matrix(p + "ffn_up.weight", c.n_ff, c.n_embd);
      matrix(p + "ffn_down.weight", c.n_embd, c.n_ff);
    }
    vector("output_norm.weight", c.n_embd, 1.0f);
    matrix("output.weight", c.n_vocab, c.n_embd);

    std::ofstream out(path_, std::ios::binary);
    std::string head = "GGUF";
    put(head, std::uint32_t{3});
    put(head, n_tensors_);
    put(head, n_keys_);
    head += keys_ + infos_;
    head.resize((head.size() + 31) / 32 * 32);
    out << head << data_;
  }
  ~File() { std::filesystem::remove(path_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  template <class T>
  static void put(std::string& to, T value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static void put_text(std::string& to, const std::string& s) {
    put(to, std::uint64_t{s.size()});
    to += s;
  }
  void key(const std::string& name, std::uint32_t type) {
    put_text(keys_, name);
    put(keys_, type);
    ++n_keys_;
  }
  void text(const std::string& name, const std::string& value) {
    key(name, 8);
    put_text(keys_, value);
  }
  void number(const std::string& name, std::int32_t value) {
    key("llama." + name, 4);
    put(keys_, static_cast<std::uint32_t>(value));
  }
  void tensor(const std::string& name, std::vector<int> dims, float spread, float centre, const Edit& edit) {
    std::size_t n = 1;
    put_text(infos_, name);
    put(infos_, static_cast<std::uint32_t>(dims.size()));
    for (const int d : dims) put(infos_, static_cast<std::uint64_t>(d)), n *= static_cast<std::size_t>(d);
    put(infos_, std::uint32_t{0});  // F32
    put(infos_, std::uint64_t{data_.size()});
    Random random(n_tensors_++);
    std::vector<float> values(n);
    for (float& v : values) v = centre + spread * random();
    if (edit) edit(name, values);
    data_.append(reinterpret_cast<const char*>(values.data()), n * sizeof(float));
    data_.resize((data_.size() + 31) / 32 * 32);
  }

  std::filesystem::path path_;
  std::string keys_, infos_, data_;
  std::uint64_t n_keys_ = 0, n_tensors_ = 0;
};

// The same tokens for every test.
inline std::vector<std::int32_t> tokens(std::size_t n, std::int32_t n_vocab = config().n_vocab) {
  std::vector<std::int32_t> ids(n);
  for (std::size_t i = 0; i < n; ++i)
    ids[i] = static_cast<std::int32_t>((i * i * 7 + i * 3 + 5) % static_cast<std::size_t>(n_vocab));
  return ids;
}

}  // namespace tiny

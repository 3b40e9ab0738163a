// The matrix products of a step: which rows a thread takes, and its input as the kernels want it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/team.h"
#include "host/memory.h"
#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/config.h"

namespace ringlm::cpu {

// Rows of activations as the input of products: as they are, and quantized where a matrix wants that.
struct Input {
  const float* x;              // [M, cols]
  const std::byte* quantized;  // [act_bytes(cols, M)] or null
  std::size_t M;
};

// Where in Activations::quantized the rows of one expert end, that begin at 0: [n, cols] quantized.
constexpr std::size_t run_bytes(std::int32_t cols, std::int64_t n) {
  return (act_bytes(cols, n) + 63) / 64 * 64;
}

// y [M, rows] (+)= w x + bias, or into a row of its own for every token.
struct Product {
  const MatrixView* w;
  const float* bias;
  float* y;
  bool add = false;
  float* const* into = nullptr;
};

class Products {
 public:
  // pack: the file's matrices are brought into the order of the kernels, by all threads, and the file's pages
  // are let go. Throws OutOfMemory where they do not fit.
  Products(const Config& c, const Weights& w, const Kernels& k, Team& team, bool pack);

  const MatrixView& matrix(const Matrix& w) const { return matrices_[w.index]; }
  bool packed() const { return packed_; }
  std::size_t packed_bytes() const;
  std::size_t quantized_bytes(const Config& c, std::int64_t M) const {
    return packed_ ? most_bytes(c, M) : 0;
  }
  // What the inputs of a step's products take at most, one operation's at a time.
  static std::size_t most_bytes(const Config& c, std::int64_t M);
  std::size_t scratch_bytes() const {
    return scratch_.size() * sizeof(Line) + matrices_.size() * sizeof(MatrixView);
  }

  Product product(const Matrix& w, const Vector& bias, std::span<float> y) const {
    return {&matrices_[w.index], bias.empty() ? nullptr : bias.data(), y.data()};
  }

  // Whether one of them reads its input quantized.
  static bool want_quantized(std::span<const Product> products);

  // The groups of all products' rows, in parts for the threads.
  Claims claims(std::span<const Product> products, std::size_t M) const;
  Claims claims(std::int64_t groups, std::size_t group_bytes, std::size_t M) const;

  // Inside Team::run(): every row of x [M, n_embd] after its norm, or x [M, cols] as it is. Returns when
  // all rows are there. One row is done by every thread for itself, which is quicker than to wait for
  // another.
  Input normed(const Config& c, const Vector& weight, const Step& s, std::span<const Product> products,
               int thread);
  Input input(std::span<const float> x, std::size_t M, const Step& s, std::span<const Product> products,
              int thread);

  // Groups [begin, end) of all products' rows, counted through.
  void multiply(std::span<const Product> products, const Input& x, std::int64_t begin, std::int64_t end,
                int thread);

  // Of a thread, for anything: a row of activations, or a head.
  float* scratch(int thread) { return reinterpret_cast<float*>(memory(thread)); }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  // The memory of a thread, in bytes from its beginning: a row after its norm (or a head), the row quantized,
  // and what matmul or row_matmul asks for.
  struct Scratch {
    std::size_t quantized, product, end;
    explicit Scratch(const Config& c);
  };

  void pack(const Weights& w);
  std::byte* memory(int thread) {
    return scratch_[static_cast<std::size_t>(thread) * scratch_at_.end / sizeof(Line)].bytes;
  }
  std::byte* quantized(int thread) { return memory(thread) + scratch_at_.quantized; }

  const Kernels& k_;
  Team& team_;
  const bool packed_;
  host::Region region_;               // of the packed matrices
  std::vector<MatrixView> matrices_;  // by Matrix::index, packed or as in the file
  const Scratch scratch_at_;
  std::vector<Line> scratch_;  // [threads, scratch_at_.end]
};

}  // namespace ringlm::cpu

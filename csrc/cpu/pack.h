// Weights in the order in which the kernels read them: a lane is a row.
//
// Rows come in groups of kGroup, the last one filled up with zeros. A group's blocks lie one behind the
// other, and inside a block each field of GGUF's block is transposed over the rows of the group, in units of
// a scale (2 bytes), a word of codes (4 bytes) or 4 bits. So a vector register that is filled with
// consecutive bytes holds the same columns of 16 rows, a product needs no sum across lanes, and a matrix
// takes as many bytes as in the file. Types without blocks are transposed element by element.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gguf/types.h"

namespace ringlm::cpu {

constexpr std::int32_t kGroup = 16;

// Whether there are kernels that read packed rows of this type.
bool can_pack(gguf::DType type);

// A matrix in either order.
struct MatrixView {
  gguf::DType type;
  std::int32_t rows, cols;
  std::size_t row_bytes;     // in the file
  const std::uint8_t* data;  // [rows, row_bytes] in the file, [groups, kGroup * row_bytes] when packed
  bool packed = false;

  std::int32_t groups() const { return (rows + kGroup - 1) / kGroup; }
  std::size_t group_bytes() const { return kGroup * row_bytes; }
  std::size_t packed_bytes() const { return static_cast<std::size_t>(groups()) * group_bytes(); }
};

// Groups [begin, end) of `to` from rows in GGUF's layout, into out, which is where to.data points.
void pack(const MatrixView& to, const std::uint8_t* rows, std::int32_t begin, std::int32_t end,
          std::uint8_t* out);

// A row as it was, [row_bytes].
void unpack_row(const MatrixView& from, std::int32_t row, std::uint8_t* out);

}  // namespace ringlm::cpu

// x = rows of the embedding table, scaled; and x as the input of the first product.
//
// Byte floor: M rows of the table, read once, and M * cols floats written, with 84 bytes for each 32 of them.
// A warp takes 32 columns of a row, a lane a column; blockIdx.y is the row. No shared memory. Any cols.
#pragma once

#include "cuda/pack.h"
#include "cuda/quantize.h"

namespace ringlm::cuda {

// One weight, with the bits that ringlm::dequantize gives: for lanes that take neighbouring columns.
template <gguf::DType kType>
__device__ __forceinline__ float dequantize_one(const DeviceMatrix& w, int row, int column) {
  using Places = TilePlaces<kType>;
  constexpr Layout kLayout = Places::kLayout;
  const TileOf<kType> tile(row, column / kBlock, blocks_of(w.cols));
  const std::uint8_t* const at = w.data + tile.offset;
  const int c = column % kBlock;
  if constexpr (kFloats<kType>) {
    constexpr int kBytes = kLayout.codes / kBlock, kInPiece = 16 / kBytes;
    const std::uint32_t bits =
        ld_bits<kBytes>(at + tile.places.codes(tile.row, c / kInPiece, tile.block) + c % kInPiece * kBytes);
    return float_of<kType>(make_uint4(bits, 0, 0, 0), 0);
  } else {
    constexpr bool kSigned = kType == gguf::DType::Q8_0;
    const Scale scale =
        scale_of<kType>(ld_bits<kLayout.scales>(at + tile.places.scales(tile.row, tile.block)),
                        ld_bits<kLayout.super>(at + tile.places.super(tile.row, tile.block)));
    const int byte = ld_global(at + tile.places.codes(tile.row, kSigned ? c / 16 : 0, tile.block) + c % 16);
    int code = kSigned ? static_cast<std::int8_t>(byte) : c < 16 ? byte & 15 : byte >> 4;
    const std::uint8_t* const high = at + tile.places.high(tile.row, tile.block) + c % 4;
    if constexpr (kLayout.high == 4) code |= (ld_global(high) >> c / 4 & 1) << 4;
    if constexpr (kLayout.high == 8) code |= (ld_global(high + c / 16 * 4) >> c % 16 / 4 * 2 & 3) << 4;
    const auto value = static_cast<float>(code - kZero<kType>);
    if constexpr (kMinima<kType>) return value * scale.d + scale.m;
    return value * (kHalfScales<kType> && c >= 16 ? scale.m : scale.d);
  }
}

template <gguf::DType kType>
__global__ void __launch_bounds__(128) embed_rows(Embed a) {
  const int lane = static_cast<int>(threadIdx.x) % 32, m = static_cast<int>(blockIdx.y), cols = a.table.cols;
  const int block = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32),
            column = block * kBlock + lane;
  if (block >= blocks_of(cols)) return;
  float x = 0.0f, weight = 0.0f;
  if (column < cols) {
    x = a.scale * dequantize_one<kType>(a.table, ld_global(&a.rows[m].token), column);
    st_global(a.x + static_cast<std::int64_t>(m) * cols + column, x);
    weight = a.next_norm ? ld_global(a.next_norm + column) : 1.0f;
  }
  if (a.next.digits) quantize_block(a.next, m, block, x, weight);
}

}  // namespace ringlm::cuda

#include "cuda/pack.h"

#include "cuda/check_launch.h"

namespace ringlm::cuda {

bool can_pack(gguf::DType type) { return layout_of(type).codes != 0; }

std::size_t packed_bytes(gguf::DType type, std::int64_t rows, std::int32_t cols) {
  const auto groups = static_cast<std::size_t>((rows + kGroupRows - 1) / kGroupRows);
  const auto bytes = groups * static_cast<std::size_t>(group_bytes(layout_of(type), blocks_of(cols)));
  return (bytes + 255) / 256 * 256;
}

void pack(const DeviceMatrix& to, std::uint8_t* data, const std::uint8_t* file, std::int64_t first,
          std::int64_t n, Stream stream) {
  const std::int64_t padded = (n + kGroupRows - 1) / kGroupRows * kGroupRows;
  const auto grid = static_cast<unsigned>((padded * blocks_of(to.cols) + 255) / 256);
  const Pack a{data, file, first, n, to.cols};
  with_packed_type(to.type, [&](auto type) {
    LAUNCH(pack_rows<decltype(type)::value>, dim3(grid), dim3(256), 0, stream, a);
  });
  check_launch("pack");
}

}  // namespace ringlm::cuda

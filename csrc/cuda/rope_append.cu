#include "cuda/rope_append.h"

#include <algorithm>

namespace ringlm::cuda {
namespace {

template <int kValues, int kOrder>
void launch(const RopeAppend& a, const kv::Rotation& rotation, Stream stream) {
  const bool all_heads = a.qk_norm == QkNorm::Full;
  const int warps = all_heads ? std::min(a.n_head, kRopeMostWarps) : kRopeWarps;
  const int heads_per_block = all_heads ? std::max(a.n_head, a.n_head_kv) : kRopeWarps;
  const auto blocks = [&](int heads) { return (heads + heads_per_block - 1) / heads_per_block; };
  const dim3 grid(static_cast<unsigned>(blocks(a.n_head) + 2 * blocks(a.n_head_kv)),
                  static_cast<unsigned>(a.M));
  const auto floats = static_cast<std::size_t>(kOrder > 1 ? warps * a.head_dim : 0);
  LAUNCH((rope_append_kernel<kValues, kOrder>), grid, dim3(static_cast<unsigned>(32 * warps)),
         sizeof(float) * floats, stream, a, rotation, heads_per_block);
}

}  // namespace

void rope_append(const RopeAppend& a, Stream stream) {
  const kv::Rotation rotation = rotation_of(a.head_dim);
  const int d = a.head_dim;
  switch (rotation.m) {
    case 12:
      d <= 96 ? launch<3, 12>(a, rotation, stream) : launch<8, 12>(a, rotation, stream);
      break;
    case 20:
      d <= 96 ? launch<3, 20>(a, rotation, stream) : launch<8, 20>(a, rotation, stream);
      break;
    default:
      if (d <= 64) {
        launch<2, 1>(a, rotation, stream);
      } else {
        d <= 128 ? launch<4, 1>(a, rotation, stream) : launch<8, 1>(a, rotation, stream);
      }
  }
  check_launch("rope_append");
}

}  // namespace ringlm::cuda

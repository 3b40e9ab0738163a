#include "cuda/embed.h"

namespace ringlm::cuda {

void embed(const Embed& a, Stream stream) {
  const dim3 grid(static_cast<unsigned>((blocks_of(a.table.cols) + 3) / 4), static_cast<unsigned>(a.M));
  with_packed_type(a.table.type, [&](auto type) {
    LAUNCH(embed_rows<decltype(type)::value>, grid, dim3(128), 0, stream, a);
  });
  check_launch("embed");
}

}  // namespace ringlm::cuda

#include "cuda/prefill_attention.h"

#include <string>

#include "ringlm/error.h"

namespace ringlm::cuda {
namespace {

template <int kHeadDim>
void launch(const Attend& a, Stream stream) {
  const int rows = a.M * (a.n_head / a.n_head_kv);
  const dim3 grid(static_cast<unsigned>(a.n_head_kv),
                  static_cast<unsigned>((rows + kPrefillRows - 1) / kPrefillRows));
  LAUNCH(prefill_attention_kernel<kHeadDim>, grid, dim3(kPrefillThreads),
         PrefillShape<kHeadDim>::kSharedBytes, stream, a);
  check_launch("prefill_attention");
}

}  // namespace

void prefill_attention(const Attend& a, Stream stream) {
  if (a.k_format == KvFormat::F32 || a.v_format == KvFormat::F32) {
    throw InvalidArgument("prefill_attention: rows of F32, takes F16 and INT8");
  }
  switch (a.head_dim) {
    case 64:
      return launch<64>(a, stream);
    case 80:
      return launch<80>(a, stream);
    case 96:
      return launch<96>(a, stream);
    case 128:
      return launch<128>(a, stream);
    case 256:
      return launch<256>(a, stream);
    default:
      throw InvalidArgument("prefill_attention: head size " + std::to_string(a.head_dim) +
                            ", takes 64, 80, 96, 128 and 256");
  }
}

}  // namespace ringlm::cuda

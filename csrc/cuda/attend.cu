#include "cuda/attend.h"

#include <stdexcept>

namespace ringlm::cuda {
namespace {

template <KvFormat kKeyFormat, KvFormat kValueFormat, int kHeadDim, int kHeadTiles>
void launch(const Attend& a, Stream stream) {
  const int group = a.n_head / a.n_head_kv, heads = kHeadTiles * attention::kColumns;
  const dim3 grid(static_cast<unsigned>(a.n_head_kv * ((group + heads - 1) / heads)),
                  static_cast<unsigned>(a.splits), static_cast<unsigned>(a.M));
  LAUNCH((attend_kernel<kKeyFormat, kValueFormat, kHeadDim, kHeadTiles>), grid, dim3(attention::kWarps * 32),
         0, stream, a);
}

template <int kHeadDim>
void launch(const Attend& a, Stream stream) {
  constexpr KvFormat kF16 = KvFormat::F16, kInt8 = KvFormat::Int8;
  const bool int8_keys = a.k_format == kInt8, int8_values = a.v_format == kInt8;
  const int tiles = attention::head_tiles(a.n_head / a.n_head_kv, kHeadDim, int8_keys == int8_values);
  if constexpr (attention::head_tiles(attention::kColumns + 1, kHeadDim, true) == 2) {
    if (tiles == 2) {
      return int8_keys ? launch<kInt8, kInt8, kHeadDim, 2>(a, stream)
                       : launch<kF16, kF16, kHeadDim, 2>(a, stream);
    }
  }
  if (int8_keys) {
    return int8_values ? launch<kInt8, kInt8, kHeadDim, 1>(a, stream)
                       : launch<kInt8, kF16, kHeadDim, 1>(a, stream);
  }
  return int8_values ? launch<kF16, kInt8, kHeadDim, 1>(a, stream)
                     : launch<kF16, kF16, kHeadDim, 1>(a, stream);
}

}  // namespace

std::size_t attend_partial_floats(const Attend& a) {
  return static_cast<std::size_t>(a.M) * static_cast<std::size_t>(a.n_head) *
         static_cast<std::size_t>(a.splits) * static_cast<std::size_t>(a.head_dim + 2);
}

void attend(const Attend& given, Stream stream) {
  Attend a = given;
  if (!attend_quantizes(a)) a.out.digits = nullptr;
  if (a.k_format == KvFormat::F32 || a.v_format == KvFormat::F32) {
    throw std::invalid_argument("attend: rows of F32");
  }
  switch (a.head_dim) {
    case 64:
      launch<64>(a, stream);
      break;
    case 80:
      launch<80>(a, stream);
      break;
    case 96:
      launch<96>(a, stream);
      break;
    case 128:
      launch<128>(a, stream);
      break;
    case 256:
      launch<256>(a, stream);
      break;
    default:
      throw std::invalid_argument("attend: a head size other than 64, 80, 96, 128 and 256");
  }
  check_launch("attend");
}

}  // namespace ringlm::cuda

#include "cpu/fast_types.h"

namespace ringlm::cpu {

std::span<const gguf::DType> fast_types() {
  using gguf::DType;
  static constexpr DType types[] = {
      DType::F32,  DType::F16,  DType::Q4_0,   DType::Q4_1,   DType::Q5_0,
      DType::Q5_1, DType::Q8_0, DType::Q2_K,   DType::Q3_K,   DType::Q4_K,
      DType::Q5_K, DType::Q6_K, DType::IQ4_NL, DType::IQ4_XS, DType::BF16,
  };
  return types;
}

}  // namespace ringlm::cpu

// How a row of the K/V cache is stored.
#pragma once

#include <cstddef>

namespace ringlm {

enum class KvFormat {
  F32,   // exact: for proofs
  F16,   // round to nearest even
  Int8,  // symmetric codes with one f16 scale per row, after a rotation (kv/rotation.h) and centring
         // (kv/cache.h)
};

constexpr std::size_t element_bytes(KvFormat format) {
  return format == KvFormat::F32 ? 4 : format == KvFormat::F16 ? 2 : 1;
}
constexpr std::size_t scale_bytes(KvFormat format) { return format == KvFormat::Int8 ? 2 : 0; }

}  // namespace ringlm

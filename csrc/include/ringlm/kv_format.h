// How a row of the K/V cache is stored.
#pragma once

#include <cstddef>

namespace ringlm {

enum class KvFormat {
  F32,  // exact: for proofs
  F16,  // round to nearest even
};

constexpr std::size_t element_bytes(KvFormat format) { return format == KvFormat::F32 ? 4 : 2; }

}  // namespace ringlm

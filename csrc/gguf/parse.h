// One GGUF file's bytes, parsed and validated. Knows nothing of other files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/name_index.h"
#include "gguf/types.h"
#include "gguf/values.h"

namespace ringlm::gguf {

struct Entry {
  std::string_view key;
  Value value;
};

struct Tensor {
  std::string_view name;
  DType type;
  std::uint32_t n_dims;   // 1 to 4
  std::uint64_t dims[4];  // dims[0] is contiguous (a row); unused ones are 1
  std::uint64_t n_elements;
  std::span<const std::byte> data;  // begins at a multiple of at least 8 bytes
  std::uint64_t offset;             // of `data` in its file
  std::uint32_t shard;              // which of paths() it lies in
};

// Limits that the format does not set. Real files stay orders of magnitude below them.
inline constexpr std::uint64_t max_keys = std::uint64_t{1} << 16;
inline constexpr std::uint64_t max_tensors = std::uint64_t{1} << 20;
inline constexpr std::uint64_t max_name_bytes = 65535;           // the specification's limit for keys
inline constexpr std::uint64_t max_alignment = 2 * 1024 * 1024;  // a huge page: nothing gains from more
inline constexpr std::uint64_t min_alignment = 8;                // the specification's "multiple of 8"
inline constexpr std::uint64_t default_alignment = 32;

// `alignment` is a power of two; positions in a file are far below 2^63, so the sum cannot wrap.
constexpr std::uint64_t align_up(std::uint64_t position, std::uint64_t alignment) {
  return (position + alignment - 1) & ~(alignment - 1);
}

struct Parsed {
  std::uint32_t version = 0;
  std::uint64_t alignment = default_alignment;
  bool has_alignment = false;   // general.alignment is there
  std::uint64_t infos_end = 0;  // where the tensor infos end; their data begins at the next aligned byte
  std::vector<Entry> metadata;
  NameIndex keys;               // of `metadata`
  std::vector<Tensor> tensors;  // shard is 0
  const Value* find(std::string_view key) const noexcept;
};

// The results point into `bytes`. Memory is a small multiple of the part of the file that holds keys and
// tensor infos. Throws FileFormatError or UnsupportedModelError; messages begin with `path`. Names may
// still repeat among `tensors`: File looks for that over all files of a set.
Parsed parse(std::span<const std::byte> bytes, const std::filesystem::path& path);

// "<path>: key '<key>'", the start of a message.
std::string locate_key(const std::filesystem::path& path, std::string_view key);

}  // namespace ringlm::gguf

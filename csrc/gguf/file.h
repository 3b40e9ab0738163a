// A GGUF file (or a set of split files), parsed, validated and mapped read-only. Knows no model.
//
// Every file is treated as hostile: when open() returns, every key, string, array and tensor of the
// file lies inside the mapping and every type is known, so that later reads need no checks.
// Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "gguf/mapping.h"
#include "gguf/name_index.h"
#include "gguf/parse.h"
#include "gguf/types.h"
#include "gguf/values.h"

namespace ringlm::gguf {

class File {
 public:
  // Throws FileFormatError (bytes contradict the format), UnsupportedModelError (big-endian, unknown
  // tensor type or version, nested arrays) or Error (a file cannot be opened, or a sibling is missing).
  // With `split.count` > 1 the siblings are found beside `path`, whichever of them it names, and their
  // tensors are one set.
  static File open(const std::filesystem::path& path);

  std::uint32_t version() const noexcept { return version_; }
  std::uint64_t alignment() const noexcept { return alignment_; }  // of the first shard
  std::span<const std::filesystem::path> paths() const noexcept { return paths_; }
  std::uint64_t file_bytes() const noexcept;  // of all shards

  std::span<const Entry> metadata() const noexcept { return metadata_; }  // of the first shard, in order
  std::span<const Tensor> tensors() const noexcept { return tensors_; }   // of all shards, in order
  const Value* find(std::string_view key) const noexcept;                 // nullptr when absent
  const Tensor* find_tensor(std::string_view name) const noexcept;

  // Typed reads of one key. nullopt when the key is absent; FileFormatError, naming key, found and
  // expected type, when it is there with another type. Integers accept every integer type whose value
  // fits; floats accept F32, F64 and integers.
  std::optional<std::uint64_t> get_uint(std::string_view key) const;
  std::optional<std::int64_t> get_int(std::string_view key) const;
  std::optional<double> get_float(std::string_view key) const;
  std::optional<bool> get_bool(std::string_view key) const;
  std::optional<std::string_view> get_string(std::string_view key) const;
  std::optional<std::vector<std::string_view>> get_strings(std::string_view key) const;  // array of strings
  std::optional<std::vector<std::int64_t>> get_ints(
      std::string_view key) const;                                            // array of integers or bools
  std::optional<std::vector<double>> get_floats(std::string_view key) const;  // array of numbers

 private:
  std::uint32_t version_ = 0;
  std::uint64_t alignment_ = default_alignment;
  std::vector<std::filesystem::path> paths_;
  std::vector<Mapping> mappings_;
  std::vector<Entry> metadata_;
  std::vector<Tensor> tensors_;
  NameIndex key_index_;
  NameIndex tensor_index_;
};

}  // namespace ringlm::gguf

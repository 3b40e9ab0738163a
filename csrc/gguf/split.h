// Models that are split over several GGUF files, as llama.cpp's gguf-split and the `gguf` package write
// them: `<prefix>-00001-of-00003.gguf` and so on, each with its own split.no (from 0), split.count and
// split.tensors.count (of all files).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "gguf/parse.h"

namespace ringlm::gguf {

struct Split {
  std::uint64_t no = 0;
  std::uint64_t count = 0;                   // 0 or 1: the file stands alone (gguf-split --merge leaves 0)
  std::optional<std::uint64_t> n_tensors{};  // of all files
  bool operator==(const Split&) const = default;
};

// What the file says about itself. Throws FileFormatError when the keys contradict each other.
Split read_split(const Parsed& file, const std::filesystem::path& path);

// The paths of all files of the set that `path`, with split.count > 1, belongs to. Throws FileFormatError
// when its name is not the one that `split` asks for, and Error naming the first file that is missing.
std::vector<std::filesystem::path> find_siblings(const Split& split, const std::filesystem::path& path);

}  // namespace ringlm::gguf

#include "gguf/split.h"

#include <cstdio>
#include <string>
#include <string_view>
#include <system_error>

#include "gguf/text.h"
#include "ringlm/error.h"

namespace ringlm::gguf {
namespace {

constexpr std::uint64_t max_files = 65535;  // split.count is written as u16

// "-00002-of-00003.gguf"; `no` counts from 0, names from 1.
std::string suffix(std::uint64_t no, std::uint64_t count) {
  char text[64];
  std::snprintf(text, sizeof text, "-%05u-of-%05u.gguf", static_cast<unsigned>(no + 1),
                static_cast<unsigned>(count));
  return text;
}

std::optional<std::uint64_t> read_key(const Parsed& file, const std::filesystem::path& path,
                                      std::string_view key) {
  const Value* value = file.find(key);
  if (value == nullptr) return std::nullopt;
  return to_uint(*value, locate_key(path, key));
}

}  // namespace

Split read_split(const Parsed& file, const std::filesystem::path& path) {
  const auto no = read_key(file, path, "split.no");
  const auto count = read_key(file, path, "split.count");
  const Split split{no.value_or(0), count.value_or(0), read_key(file, path, "split.tensors.count")};
  if (split.count > max_files) {
    throw FileFormatError(locate_key(path, "split.count") + " is " + std::to_string(split.count) +
                          ", expected at most " + std::to_string(max_files));
  }
  if (split.count > 1 && !no)
    throw FileFormatError(locate_key(path, "split.no") + " is missing beside split.count");
  if (split.no > 0 && split.no >= split.count) {
    throw FileFormatError(locate_key(path, "split.no") + " is " + std::to_string(split.no) +
                          ", expected less than split.count, which is " +
                          (count ? std::to_string(*count) : "missing"));
  }
  return split;
}

std::vector<std::filesystem::path> find_siblings(const Split& split, const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  const std::string own = suffix(split.no, split.count);
  if (!name.ends_with(own)) {
    throw FileFormatError(printable_path(path) + ": split.no says that this is file " +
                          std::to_string(split.no + 1) + " of " + std::to_string(split.count) +
                          ", so its name must end in '" + own +
                          "' for the others to be found beside it: give it its original name");
  }
  const std::string prefix = name.substr(0, name.size() - own.size());
  std::vector<std::filesystem::path> paths;
  for (std::uint64_t no = 0; no < split.count; ++no) {
    paths.push_back(path.parent_path() / (prefix + suffix(no, split.count)));
    std::error_code ignored;
    if (!std::filesystem::exists(paths.back(), ignored)) {
      throw Error(printable_path(paths.back()) + ": file " + std::to_string(no + 1) + " of the " +
                  std::to_string(split.count) +
                  " that the model is split into is missing; all must be in one folder");
    }
  }
  return paths;
}

}  // namespace ringlm::gguf

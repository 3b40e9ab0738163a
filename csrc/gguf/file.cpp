#include "gguf/file.h"

#include <iterator>
#include <string>
#include <utility>

#include "gguf/split.h"
#include "gguf/text.h"
#include "ringlm/error.h"

namespace ringlm::gguf {
namespace {

struct Shard {
  explicit Shard(const std::filesystem::path& path)
      : mapping(path), content(parse(mapping.bytes(), path)), split(read_split(content, path)) {}

  Mapping mapping;
  Parsed content;
  Split split;
};

// `shard` is file `no` of the set that begins with `first`.
void check_sibling(const Shard& first, const Shard& shard, std::uint64_t no,
                   const std::filesystem::path& path) {
  const auto differ = [&](std::string_view key, const std::string& found, const std::string& expected) {
    throw FileFormatError(locate_key(path, key) + " is " + found + ", expected " + expected +
                          ": the file belongs to another set");
  };
  const auto text = [](std::optional<std::uint64_t> n) { return n ? std::to_string(*n) : "missing"; };
  if (shard.split.no != no) differ("split.no", text(shard.split.no), text(no));
  if (shard.split.count != first.split.count) {
    differ("split.count", text(shard.split.count), text(first.split.count));
  }
  if (shard.split.n_tensors != first.split.n_tensors) {
    differ("split.tensors.count", text(shard.split.n_tensors), text(first.split.n_tensors));
  }
  // Some writers apply the first file's alignment to the others without saying so there, some the default.
  // Where the two put the data at different places, a guess could read wrong weights.
  const std::uint64_t assumed = first.content.alignment;
  const std::uint64_t end = shard.content.infos_end;
  if (!shard.content.has_alignment && align_up(end, assumed) != align_up(end, default_alignment)) {
    throw FileFormatError(locate_key(path, "general.alignment") + " is missing, while the first file has " +
                          std::to_string(assumed) +
                          ", so the place of the data is not certain: split the model again");
  }
}

template <typename Convert>
auto get(const File& file, std::string_view key, Convert convert)
    -> std::optional<decltype(convert(std::declval<const Value&>(), std::declval<const std::string&>()))> {
  const Value* value = file.find(key);
  if (value == nullptr) return std::nullopt;
  return convert(*value, locate_key(file.paths().front(), key));
}

}  // namespace

File File::open(const std::filesystem::path& path) {
  std::vector<Shard> shards;
  shards.emplace_back(path);
  File file;
  file.paths_ = {path};
  if (const Split given = shards.front().split; given.count > 1) {
    file.paths_ = find_siblings(given, path);
    Shard shard = std::move(shards.front());
    shards.clear();
    for (std::uint64_t no = 0; no < given.count; ++no) {
      shards.push_back(no == given.no ? std::move(shard) : Shard(file.paths_[no]));
      check_sibling(shards.front(), shards.back(), no, file.paths_[no]);
    }
  }

  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (Tensor tensor : shards[i].content.tensors) {
      tensor.shard = static_cast<std::uint32_t>(i);
      file.tensor_index_.add(tensor.name, file.tensors_.size());
      file.tensors_.push_back(tensor);
    }
    file.mappings_.push_back(std::move(shards[i].mapping));
  }
  if (const auto twins = file.tensor_index_.finish()) {
    const Tensor& a = file.tensors_[twins->first];
    const Tensor& b = file.tensors_[twins->second];
    throw FileFormatError(
        printable_path(file.paths_[b.shard]) + ": tensor " + quoted(b.name) + " is there twice" +
        (a.shard == b.shard ? "" : "; the other one is in " + printable_path(file.paths_[a.shard])));
  }
  const Shard& first = shards.front();
  if (first.split.count > 1 && first.split.n_tensors.value_or(file.tensors_.size()) != file.tensors_.size()) {
    throw FileFormatError(locate_key(path, "split.tensors.count") + " is " +
                          std::to_string(*first.split.n_tensors) + ", but the files hold " +
                          std::to_string(file.tensors_.size()) + " tensors");
  }
  file.version_ = first.content.version;
  file.alignment_ = first.content.alignment;
  file.metadata_ = std::move(shards.front().content.metadata);
  file.key_index_ = std::move(shards.front().content.keys);
  return file;
}

std::uint64_t File::file_bytes() const noexcept {
  std::uint64_t sum = 0;
  for (const Mapping& mapping : mappings_) sum += mapping.bytes().size();
  return sum;
}

const Value* File::find(std::string_view key) const noexcept {
  const auto position = key_index_.find(key);
  return position ? &metadata_[*position].value : nullptr;
}

const Tensor* File::find_tensor(std::string_view name) const noexcept {
  const auto position = tensor_index_.find(name);
  return position ? &tensors_[*position] : nullptr;
}

std::optional<std::uint64_t> File::get_uint(std::string_view key) const { return get(*this, key, to_uint); }
std::optional<std::int64_t> File::get_int(std::string_view key) const { return get(*this, key, to_int); }
std::optional<double> File::get_float(std::string_view key) const { return get(*this, key, to_float); }
std::optional<bool> File::get_bool(std::string_view key) const { return get(*this, key, to_bool); }
std::optional<std::string_view> File::get_string(std::string_view key) const {
  return get(*this, key, to_string);
}
std::optional<std::vector<std::string_view>> File::get_strings(std::string_view key) const {
  return get(*this, key, to_strings);
}
std::optional<std::vector<std::int64_t>> File::get_ints(std::string_view key) const {
  return get(*this, key, to_ints);
}
std::optional<std::vector<double>> File::get_floats(std::string_view key) const {
  return get(*this, key, to_floats);
}

}  // namespace ringlm::gguf

#include "gguf/parse.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "gguf/text.h"
#include "ringlm/error.h"

namespace ringlm::gguf {
namespace {

// Least bytes of one key with its value (length, one byte, type, one byte), and of one tensor info (length,
// one byte, n_dims, one dimension, type, offset).
constexpr std::uint64_t min_entry_bytes = 8 + 1 + 4 + 1;
constexpr std::uint64_t min_info_bytes = 8 + 1 + 4 + 8 + 4 + 8;

// Lists start no larger than this, whatever a count claims, and grow with what is really there.
constexpr std::uint64_t max_reserve = 1024;

std::optional<std::uint64_t> product(std::uint64_t a, std::uint64_t b) {
  if (b != 0 && a > std::numeric_limits<std::uint64_t>::max() / b) return std::nullopt;
  return a * b;
}

std::string supported_types() {
  std::string names;
  for (const TypeTraits& t : all_types()) names += (names.empty() ? "" : ", ") + std::string(t.name);
  return names;
}

// What a file without GGUF's magic looks like, with what to do; "" when it looks like nothing known.
std::string guess_content(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()),
                              std::min<std::size_t>(bytes.size(), 512));
  struct Known {
    std::string_view start;
    std::string_view what;
  };
  static constexpr Known known[] = {
      {"version https://git-lfs", "a Git LFS pointer: run `git lfs pull` to fetch the file itself"},
      {"PK\3\4", "a zip archive (a PyTorch checkpoint or a Python wheel): convert or unpack it"},
      {"\x80\2", "a Python pickle (an old PyTorch checkpoint): convert it to GGUF"},
      {"\x1f\x8b", "gzip data: decompress it"},
      {"\x28\xb5\x2f\xfd", "zstd data: decompress it"},
      {"\3757zXZ", "xz data: decompress it"},
      {"lmgg", "a GGML file, the unversioned format before GGUF: convert the model to GGUF"},
      {"fmgg", "a GGMF file, a format before GGUF: convert the model to GGUF"},
      {"tjgg", "a GGJT file, a format before GGUF: convert the model to GGUF"},
      {"algg", "a GGLA adapter, a format before GGUF: convert it to GGUF"},
      {"{", "JSON text, perhaps the error message of a download"},
  };
  for (const Known& k : known) {
    if (text.starts_with(k.start)) return std::string(k.what);
  }
  if (text.size() > 9 && text[8] == '{') return "a safetensors file: convert the model to GGUF";
  const std::size_t visible = text.find_first_not_of(" \t\r\n");
  if (visible != text.npos && text[visible] == '<') {
    return "HTML or XML text, perhaps the error page of a download: fetch the file again";
  }
  if (text.find_first_not_of('\0') == text.npos) {
    return "zeros, as an interrupted download leaves them: fetch the file again";
  }
  return "";
}

// What is being read.
enum class Item { Header, Key, Tensor };

class Parser {
 public:
  Parser(std::span<const std::byte> bytes, const std::filesystem::path& path) : bytes_(bytes), path_(path) {}

  Parsed run() {
    read_header();
    read_metadata();
    check_known_keys();
    read_tensor_infos();
    place_tensors();
    check_overlap();
    return std::move(parsed_);
  }

 private:
  // ---- errors, which name the key or tensor that is being read

  std::string where() const {
    std::string text = printable_path(path_) + ": ";
    if (item_ == Item::Header) return text + "header";
    text += item_ == Item::Key ? "key " : "tensor ";
    if (!name_.empty()) return text + quoted(name_);
    return text + std::to_string(index_ + 1) + " of " +
           std::to_string(item_ == Item::Key ? n_keys_ : n_tensors_);
  }

  [[noreturn]] void fail(const std::string& what) const { throw FileFormatError(where() + ": " + what); }
  [[noreturn]] void fail_unsupported(const std::string& what) const {
    throw UnsupportedModelError(where() + ": " + what);
  }
  [[noreturn]] void fail_truncated(std::string_view what) const {
    fail(std::string(what) + " lies beyond the end of the file (" + std::to_string(bytes_.size()) +
         " bytes): the file is truncated or altered");
  }

  // ---- primitives

  std::uint64_t left() const { return bytes_.size() - at_; }

  template <typename T>
  T read(std::string_view what) {
    if (left() < sizeof(T)) fail_truncated(what);
    const T value = load<T>(bytes_.data() + at_);
    at_ += sizeof(T);
    return value;
  }

  std::string_view read_string(std::string_view what) {
    const auto length = read<std::uint64_t>(what);
    if (length > left()) {
      fail(std::string(what) + " claims " + std::to_string(length) + " bytes, but the file has " +
           std::to_string(left()) + " left: it is truncated or altered");
    }
    const std::string_view text(reinterpret_cast<const char*>(bytes_.data() + at_),
                                static_cast<std::size_t>(length));
    at_ += text.size();
    return text;
  }

  // The name of the key or tensor; from here on messages carry it.
  std::string_view read_name() {
    const std::string_view text = read_string("its name");
    if (text.empty()) fail("its name is empty");
    name_ = text;
    if (text.size() > max_name_bytes) {
      fail("its name has " + std::to_string(text.size()) + " bytes, more than " +
           std::to_string(max_name_bytes));
    }
    return text;
  }

  void start(Item item, std::uint64_t index) {
    item_ = item;
    index_ = index;
    name_ = {};
  }

  // ---- the parts of a file

  void read_header() {
    if (bytes_.empty())
      throw FileFormatError(printable_path(path_) + ": the file is empty, expected a GGUF file");
    constexpr std::string_view magic = "GGUF";
    const std::string_view found(reinterpret_cast<const char*>(bytes_.data()),
                                 std::min(bytes_.size(), magic.size()));
    if (found == "FUGG") fail_unsupported("the file is big-endian; ringlm reads little-endian GGUF");
    if (found != magic.substr(0, found.size())) {
      const std::string guess = guess_content(bytes_);
      throw FileFormatError(printable_path(path_) + ": not a GGUF file: it begins with " + quoted(found) +
                            ", not 'GGUF'" + (guess.empty() ? "" : "; it looks like " + guess));
    }
    at_ = found.size();
    if (found.size() < magic.size()) fail_truncated("the magic number");
    parsed_.version = read<std::uint32_t>("the version");
    if (parsed_.version != 0 && (parsed_.version & 0xFFFF) == 0) {
      fail_unsupported(
          "the file is big-endian; ringlm reads little-endian GGUF (gguf-convert-endian of the "
          "`gguf` package converts it)");
    }
    if (parsed_.version < 2 || parsed_.version > 3) {
      fail_unsupported("GGUF version " + std::to_string(parsed_.version) + ", expected 2 or 3" +
                       (parsed_.version == 1 ? ": convert the model again" : ""));
    }
    n_tensors_ = read<std::uint64_t>("the number of tensors");
    n_keys_ = read<std::uint64_t>("the number of keys");
    check_count("keys", n_keys_, min_entry_bytes, max_keys);
    check_count("tensors", n_tensors_, min_info_bytes, max_tensors);
  }

  void check_count(std::string_view what, std::uint64_t count, std::uint64_t least_bytes,
                   std::uint64_t most) {
    if (count > left() / least_bytes) {
      fail("it claims " + std::to_string(count) + " " + std::string(what) + ", more than the " +
           std::to_string(bytes_.size()) + " bytes of the file can hold: the file is truncated or altered");
    }
    if (count > most) {
      fail("it claims " + std::to_string(count) + " " + std::string(what) + ", ringlm reads at most " +
           std::to_string(most));
    }
  }

  void read_metadata() {
    parsed_.metadata.reserve(static_cast<std::size_t>(std::min(n_keys_, max_reserve)));
    for (std::uint64_t i = 0; i < n_keys_; ++i) {
      start(Item::Key, i);
      const std::string_view key = read_name();
      parsed_.metadata.push_back({key, read_value()});
      parsed_.keys.add(key, parsed_.metadata.size() - 1);
    }
    if (const auto twins = parsed_.keys.finish()) {
      name_ = parsed_.metadata[twins->first].key;
      fail("it is there twice");
    }
  }

  ValueType read_value_type(std::string_view what) {
    const auto id = read<std::uint32_t>(what);
    if (!is_value_type(id)) fail(std::string(what) + " is " + std::to_string(id) + ", expected 0 to 12");
    return static_cast<ValueType>(id);
  }

  Value read_value() {
    Value value{};
    value.type = value.element = read_value_type("the type of its value");
    value.count = 1;
    if (value.type == ValueType::Array) {
      value.element = read_value_type("the type of its elements");
      if (value.element == ValueType::Array) {
        fail_unsupported("an array of arrays; ringlm reads arrays of numbers, bools and strings");
      }
      value.count = read<std::uint64_t>("the length of its array");
    }
    const std::size_t begin = at_;
    if (value.element == ValueType::String) {
      skip_strings(value.count);
    } else {
      skip_numbers(value.element, value.count);
    }
    value.bytes = bytes_.subspan(begin, at_ - begin);
    if (value.element == ValueType::Bool) check_bools(value);
    return value;
  }

  void skip_numbers(ValueType type, std::uint64_t count) {
    const std::size_t size = value_size(type);
    if (count > left() / size) fail_array(count, type);
    at_ += static_cast<std::size_t>(count) * size;
  }

  void skip_strings(std::uint64_t count) {
    if (count > left() / sizeof(std::uint64_t)) fail_array(count, ValueType::String);
    for (std::uint64_t i = 0; i < count; ++i) read_string("a string of its value");
  }

  [[noreturn]] void fail_array(std::uint64_t count, ValueType type) const {
    fail("its value claims " + std::to_string(count) + " x " + std::string(name(type)) +
         ", but the file has " + std::to_string(left()) + " bytes left: it is truncated or altered");
  }

  void check_bools(const Value& value) const {
    const auto wrong = std::find_if(value.bytes.begin(), value.bytes.end(),
                                    [](std::byte b) { return std::to_integer<unsigned>(b) > 1; });
    if (wrong != value.bytes.end()) {
      fail("a bool of its value is " + std::to_string(std::to_integer<unsigned>(*wrong)) +
           ", expected 0 or 1");
    }
  }

  // The keys that give the file its own shape. The model checks those that describe it.
  void check_known_keys() {
    if (const Value* value = parsed_.find("general.architecture")) {
      to_string(*value, locate_key(path_, "general.architecture"));
    }
    const Value* value = parsed_.find("general.alignment");
    if (value == nullptr) return;
    const std::string key = locate_key(path_, "general.alignment");
    if (value->type != ValueType::U32)
      throw FileFormatError(key + " is " + describe(*value) + ", expected u32");
    const std::uint64_t alignment = to_uint(*value, key);
    if (!std::has_single_bit(alignment) || alignment < min_alignment || alignment > max_alignment) {
      throw FileFormatError(key + " is " + std::to_string(alignment) + ", expected a power of two from " +
                            std::to_string(min_alignment) + " to " + std::to_string(max_alignment));
    }
    parsed_.alignment = alignment;
    parsed_.has_alignment = true;
  }

  void read_tensor_infos() {
    start(Item::Header, 0);
    check_count("tensors", n_tensors_, min_info_bytes, max_tensors);
    parsed_.tensors.reserve(static_cast<std::size_t>(std::min(n_tensors_, max_reserve)));
    for (std::uint64_t i = 0; i < n_tensors_; ++i) {
      start(Item::Tensor, i);
      parsed_.tensors.push_back(read_tensor_info());
    }
    parsed_.infos_end = at_;
  }

  // Everything but `data`. The size in bytes is known not to overflow.
  Tensor read_tensor_info() {
    Tensor tensor{};
    tensor.name = read_name();
    tensor.n_dims = read<std::uint32_t>("the number of its dimensions");
    if (tensor.n_dims < 1 || tensor.n_dims > 4) {
      fail(std::to_string(tensor.n_dims) + " dimensions, expected 1 to 4");
    }
    std::ranges::fill(tensor.dims, 1);
    tensor.n_elements = 1;
    for (std::uint32_t d = 0; d < tensor.n_dims; ++d) {
      tensor.dims[d] = read<std::uint64_t>("a dimension");
      if (tensor.dims[d] == 0) fail("dimension " + std::to_string(d) + " is 0");
      const auto n = product(tensor.n_elements, tensor.dims[d]);
      if (!n) fail("its dimensions multiply to more than 2^64 elements");
      tensor.n_elements = *n;
    }
    const auto type = read<std::uint32_t>("its type");
    const TypeTraits* known = find_type(type);
    if (known == nullptr) {
      fail_unsupported("unknown type " + std::to_string(type) + "; ringlm knows " + supported_types());
    }
    tensor.type = known->type;
    if (tensor.dims[0] % known->block_size != 0) {
      fail("rows of " + std::to_string(tensor.dims[0]) + " elements, but " + std::string(known->name) +
           " has blocks of " + std::to_string(known->block_size));
    }
    if (!product(tensor.n_elements / known->block_size, known->block_bytes)) {
      fail("its size is more than 2^64 bytes");
    }
    tensor.offset = read<std::uint64_t>("its offset");
    return tensor;
  }

  // Turns offsets into `data`. Gaps between tensors are harmless and allowed.
  void place_tensors() {
    const std::uint64_t begin = align_up(at_, parsed_.alignment);
    for (std::size_t i = 0; i < parsed_.tensors.size(); ++i) {
      Tensor& tensor = parsed_.tensors[i];
      start(Item::Tensor, i);
      name_ = tensor.name;
      if (tensor.offset % parsed_.alignment != 0) {
        fail("its offset " + std::to_string(tensor.offset) + " is not a multiple of the alignment " +
             std::to_string(parsed_.alignment));
      }
      const TypeTraits& type = traits(tensor.type);
      const std::uint64_t size = tensor.n_elements / type.block_size * type.block_bytes;
      const std::uint64_t room = bytes_.size() > begin ? bytes_.size() - begin : 0;
      if (tensor.offset > room || size > room - tensor.offset) {
        fail(std::to_string(size) + " bytes (" + std::string(type.name) + ") at offset " +
             std::to_string(tensor.offset) + " of the data lie beyond the end of the file, whose data has " +
             std::to_string(room) + " bytes: the file is truncated or altered");
      }
      tensor.offset += begin;
      tensor.data = bytes_.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(size));
    }
  }

  // No converter lets tensors share bytes; where they do, a size, a type or an offset has been altered.
  void check_overlap() {
    std::vector<std::size_t> order(parsed_.tensors.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    const auto offset = [this](std::size_t i) { return parsed_.tensors[i].offset; };
    std::ranges::sort(order, {}, offset);
    for (std::size_t i = 1; i < order.size(); ++i) {
      const Tensor& before = parsed_.tensors[order[i - 1]];
      const Tensor& tensor = parsed_.tensors[order[i]];
      if (before.offset + before.data.size() <= tensor.offset) continue;
      name_ = tensor.name;
      fail("its data overlaps that of tensor " + quoted(before.name));
    }
  }

  std::span<const std::byte> bytes_;
  const std::filesystem::path& path_;
  std::size_t at_ = 0;
  std::uint64_t n_keys_ = 0;
  std::uint64_t n_tensors_ = 0;
  Item item_ = Item::Header;
  std::uint64_t index_ = 0;
  std::string_view name_;
  Parsed parsed_;
};

}  // namespace

const Value* Parsed::find(std::string_view key) const noexcept {
  const auto position = keys.find(key);
  return position ? &metadata[*position].value : nullptr;
}

Parsed parse(std::span<const std::byte> bytes, const std::filesystem::path& path) {
  return Parser(bytes, path).run();
}

std::string locate_key(const std::filesystem::path& path, std::string_view key) {
  return printable_path(path) + ": key " + quoted(key);
}

}  // namespace ringlm::gguf

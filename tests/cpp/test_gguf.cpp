#include <doctest/doctest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "gguf/file.h"
#include "gguf/text.h"
#include "ringlm/error.h"

using namespace ringlm;
using namespace ringlm::gguf;

namespace {

template <typename T>
std::string raw(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::string str(std::string_view text) { return raw(std::uint64_t{text.size()}) + std::string(text); }

std::string entry(std::string_view key, ValueType type, const std::string& payload) {
  return str(key) + raw(type) + payload;
}

std::string array(std::string_view key, ValueType element, std::uint64_t count, const std::string& payload) {
  return entry(key, ValueType::Array, raw(element) + raw(count) + payload);
}

std::string info(std::string_view name, const std::vector<std::uint64_t>& dims, std::uint32_t type,
                 std::uint64_t offset) {
  std::string bytes = str(name) + raw(static_cast<std::uint32_t>(dims.size()));
  for (const std::uint64_t d : dims) bytes += raw(d);
  return bytes + raw(type) + raw(offset);
}

std::string build(const std::vector<std::string>& entries, const std::vector<std::string>& infos,
                  const std::string& data, std::uint32_t version = 3) {
  std::string bytes =
      "GGUF" + raw(version) + raw(std::uint64_t{infos.size()}) + raw(std::uint64_t{entries.size()});
  for (const std::string& e : entries) bytes += e;
  for (const std::string& i : infos) bytes += i;
  if (!data.empty()) bytes.resize(align_up(bytes.size(), 32), '\0');
  return bytes + data;
}

// Every kind of value and two tensors; the last byte is the last byte of a tensor.
std::string small_model() {
  return build(
      {
          entry("general.architecture", ValueType::String, str("llama")),
          entry("general.alignment", ValueType::U32, raw(std::uint32_t{32})),
          entry("u8", ValueType::U8, raw(std::uint8_t{200})),
          entry("i8", ValueType::I8, raw(std::int8_t{-5})),
          entry("u64", ValueType::U64, raw(~std::uint64_t{0})),
          entry("i64", ValueType::I64, raw(std::int64_t{-7})),
          entry("f32", ValueType::F32, raw(0.5f)),
          entry("f64", ValueType::F64, raw(0.1)),
          entry("yes", ValueType::Bool, raw(true)),
          array("strings", ValueType::String, 3, str("a") + str("") + str("bc")),
          array("i16s", ValueType::I16, 2, raw(std::int16_t{-1}) + raw(std::int16_t{300})),
          array("u64s", ValueType::U64, 1, raw(~std::uint64_t{0})),
          array("bools", ValueType::Bool, 2, raw(true) + raw(false)),
          array("f32s", ValueType::F32, 2, raw(1.5f) + raw(-2.5f)),
      },
      {info("token_embd.weight", {32, 2}, 8, 0), info("output_norm.weight", {8}, 0, 96)},
      std::string(96, 'q') + std::string(32, 'n'));
}

// A folder for one test, removed with it.
class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "ringlm-gguf-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::filesystem::path write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name, std::ios::binary) << content;
    return path_ / name;
  }

 private:
  std::filesystem::path path_;
};

// parse() of a copy that ends exactly where the file does, so that AddressSanitizer sees one byte too far.
Parsed parse_exact(const std::vector<char>& bytes) {
  return parse(std::as_bytes(std::span(bytes.data(), bytes.size())), "memory.gguf");
}

Parsed parse_exact(const std::string& content) {
  static std::vector<char> bytes;
  bytes.assign(content.begin(), content.end());
  bytes.shrink_to_fit();
  return parse_exact(bytes);
}

template <typename E>
void check_refused(const std::string& content, const std::string& message) {
  CAPTURE(message);
  try {
    parse_exact(content);
    FAIL("the file was accepted");
  } catch (const E& e) {
    CHECK_MESSAGE(std::string(e.what()).find(message) != std::string::npos, e.what());
  }
}

// Reads every value and every byte of every tensor.
std::uint64_t read_everything(const Parsed& file) {
  std::uint64_t sum = 0;
  for (const Entry& e : file.metadata) {
    sum += e.key.size() + describe(e.value).size();
    if (e.value.element == ValueType::String) {
      StringReader reader(e.value);
      for (std::uint64_t i = 0; i < e.value.count; ++i) {
        for (const char c : reader.next()) sum += static_cast<unsigned char>(c);
      }
    }
    for (const std::byte b : e.value.bytes) sum += std::to_integer<unsigned>(b);
  }
  for (const Tensor& t : file.tensors) {
    for (const std::byte b : t.data) sum += std::to_integer<unsigned>(b);
  }
  return sum;
}

}  // namespace

TEST_CASE("typed reads") {
  const Folder folder;
  const File file = File::open(folder.write("small.gguf", small_model()));
  CHECK(file.version() == 3);
  CHECK(file.metadata().size() == 14);
  CHECK(file.get_string("general.architecture") == "llama");
  CHECK(file.get_uint("u8") == 200);
  CHECK(file.get_int("u8") == 200);
  CHECK(file.get_int("i8") == -5);
  CHECK(file.get_uint("u64") == ~std::uint64_t{0});
  CHECK(file.get_float("f32") == 0.5);
  CHECK(file.get_float("f64") == 0.1);
  CHECK(file.get_float("i64") == -7.0);
  CHECK(file.get_bool("yes") == true);
  CHECK(file.get_strings("strings") == std::vector<std::string_view>{"a", "", "bc"});
  CHECK(file.get_ints("i16s") == std::vector<std::int64_t>{-1, 300});
  CHECK(file.get_ints("bools") == std::vector<std::int64_t>{1, 0});
  CHECK(file.get_floats("f32s") == std::vector<double>{1.5, -2.5});
  CHECK(file.get_floats("i16s") == std::vector<double>{-1, 300});

  CHECK(file.find("absent") == nullptr);
  CHECK_FALSE(file.get_uint("absent"));
  CHECK_FALSE(file.get_strings("absent"));

  CHECK_THROWS_WITH_AS(file.get_uint("i8"),
                       doctest::Contains("key 'i8' is -5 (i8), expected an integer that"), FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_int("u64"), doctest::Contains("key 'u64' is 18446744073709551615 (u64)"),
                       FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_uint("f32"), doctest::Contains("'f32' is f32, expected an integer"),
                       FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_uint("yes"), doctest::Contains("'yes' is bool"), FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_float("yes"), doctest::Contains("'yes' is bool"), FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_bool("u8"), doctest::Contains("'u8' is u8, expected bool"), FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_string("strings"), doctest::Contains("is array[string], expected string"),
                       FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_strings("i16s"), doctest::Contains("is array[i16], expected array[string]"),
                       FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_ints("f32s"), doctest::Contains("is array[f32]"), FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_ints("u64s"), doctest::Contains("element 0 is 18446744073709551615"),
                       FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_ints("u8"), doctest::Contains("is u8, expected an array"), FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_floats("bools"), doctest::Contains("is array[bool]"), FileFormatError);
  CHECK_THROWS_WITH_AS(file.get_floats("strings"), doctest::Contains("is array[string]"), FileFormatError);
}

TEST_CASE("tensors") {
  const Folder folder;
  File file = File::open(folder.write("small.gguf", small_model()));
  const File moved = std::move(file);  // views stay valid: the mapping does not move
  const Tensor* embd = moved.find_tensor("token_embd.weight");
  REQUIRE(embd != nullptr);
  CHECK(embd->type == DType::Q8_0);
  CHECK(embd->n_dims == 2);
  CHECK(embd->dims[0] == 32);
  CHECK(embd->dims[1] == 2);
  CHECK(embd->dims[3] == 1);
  CHECK(embd->n_elements == 64);
  CHECK(embd->data.size() == 68);
  CHECK(std::to_integer<char>(embd->data.back()) == 'q');
  const Tensor* norm = moved.find_tensor("output_norm.weight");
  REQUIRE(norm != nullptr);
  CHECK(norm->data.size() == 32);
  CHECK(std::to_integer<char>(norm->data.front()) == 'n');
  CHECK(moved.find_tensor("output.weight") == nullptr);
  CHECK(moved.file_bytes() == small_model().size());
}

TEST_CASE("types") {
  CHECK(find_type(4) == nullptr);
  CHECK(find_type(1000) == nullptr);
  CHECK(find_type(~std::uint32_t{0}) == nullptr);
  for (const TypeTraits& t : all_types()) {
    CHECK(find_type(static_cast<std::uint32_t>(t.type)) == &t);
    CHECK(&traits(t.type) == &t);
  }
}

TEST_CASE("hostile files are refused by name") {
  using E = FileFormatError;
  const std::string u32 = raw(std::uint32_t{1});
  const std::uint64_t huge = std::uint64_t{1} << 63;
  check_refused<E>("", "the file is empty");
  check_refused<E>("<html>", "HTML");
  check_refused<E>("GG", "the magic number lies beyond the end");
  check_refused<UnsupportedModelError>(build({}, {}, "", 0x03000000), "big-endian");
  check_refused<UnsupportedModelError>(build({}, {}, "", 1), "version 1");
  check_refused<E>("GGUF" + raw(3) + raw(huge) + raw(std::uint64_t{0}), "tensors");
  check_refused<E>("GGUF" + raw(3) + raw(std::uint64_t{0}) + raw(~std::uint64_t{0}), "keys");
  check_refused<E>(build({entry("", ValueType::U32, u32)}, {}, ""), "key 1 of 1: its name is empty");
  check_refused<E>(build({entry("k", ValueType::U32, u32), entry("k", ValueType::U32, u32)}, {}, ""),
                   "key 'k'");
  check_refused<E>(build({entry("k", ValueType{13}, u32)}, {}, ""), "key 'k'");
  check_refused<E>(build({entry("k", ValueType::Bool, "\x02")}, {}, ""), "key 'k'");
  check_refused<E>(build({array("k", ValueType::U64, huge, std::string(64, '\0'))}, {}, ""), "key 'k'");
  check_refused<E>(build({array("k", ValueType::String, huge / 4, std::string(64, '\0'))}, {}, ""),
                   "key 'k'");
  check_refused<E>(build({array("k", ValueType::String, 1, raw(~std::uint64_t{0}))}, {}, ""), "key 'k'");
  check_refused<UnsupportedModelError>(build({array("k", ValueType::Array, 0, "")}, {}, ""), "key 'k'");
  for (const std::uint32_t alignment : {0u, 1u, 4u, 33u, 1u << 22, 1u << 30}) {
    check_refused<E>(build({entry("general.alignment", ValueType::U32, raw(alignment))}, {}, ""),
                     "general.alignment");
  }
  check_refused<E>(build({}, {info("t", {}, 0, 0)}, "d"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {1, 1, 1, 1, 1}, 0, 0)}, "data"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {1, 0}, 0, 0)}, "data"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {huge, 2}, 0, 0)}, "data"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {huge / 2 + 1}, 0, 0)}, "data"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {33}, 8, 0)}, std::string(99, '\0')), "tensor 't'");
  check_refused<E>(build({}, {info("t", {1}, 0, 4)}, "datadata"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {1}, 0, ~std::uint64_t{31})}, "data"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {2}, 0, 0)}, "data"), "tensor 't'");
  check_refused<E>(build({}, {info("t", {1}, 0, 0), info("u", {1}, 0, 0)}, "data"), "overlaps");
  check_refused<UnsupportedModelError>(build({}, {info("t", {1}, 5, 0)}, "data"), "tensor 't'");
}

TEST_CASE("a file cut at any byte is refused") {
  const std::string whole = small_model();
  CHECK(read_everything(parse_exact(whole)) > 0);
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CHECK_THROWS_AS(parse_exact(whole.substr(0, size)), FileFormatError);
  }
}

TEST_CASE("altered files are refused or can be read") {
  const std::string whole = small_model();
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  std::size_t opened = 0;
  std::size_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string mutant = whole;
    for (std::size_t n = below(4) + 1; n > 0; --n) {
      constexpr unsigned char values[] = {0, 1, 0x7F, 0x80, 0xFF};
      const std::size_t at = below(mutant.size());
      mutant[at] = static_cast<char>(below(2) == 0 ? values[below(5)] : mutant[at] ^ (1 << below(8)));
    }
    try {
      opened += read_everything(parse_exact(mutant)) > 0;
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(opened > 1000);
  CHECK(refused > 1000);
}

TEST_CASE("split files") {
  const auto part = [](std::uint16_t no, const std::string& name) {
    return build({entry("split.no", ValueType::U16, raw(no)),
                  entry("split.count", ValueType::U16, raw(std::uint16_t{2})),
                  entry("split.tensors.count", ValueType::I32, raw(std::int32_t{2}))},
                 {info(name, {1}, 0, 0)}, std::string(4, static_cast<char>('A' + no)));
  };
  const Folder folder;
  const auto first = folder.write("m-00001-of-00002.gguf", part(0, "a"));
  CHECK_THROWS_WITH_AS(File::open(first), doctest::Contains("m-00002-of-00002.gguf: file 2 of the 2"), Error);
  const auto second = folder.write("m-00002-of-00002.gguf", part(1, "b"));
  for (const auto& given : {first, second}) {
    const File file = File::open(given);
    REQUIRE(file.paths().size() == 2);
    CHECK(file.paths()[0] == first);
    CHECK(file.paths()[1] == second);
    REQUIRE(file.tensors().size() == 2);
    CHECK(std::to_integer<char>(file.find_tensor("a")->data[0]) == 'A');
    CHECK(std::to_integer<char>(file.find_tensor("b")->data[0]) == 'B');
    CHECK(file.find_tensor("b")->shard == 1);
  }
  folder.write("m-00002-of-00002.gguf", part(1, "a"));
  CHECK_THROWS_WITH_AS(File::open(first), doctest::Contains("tensor 'a' is there twice"), FileFormatError);
  folder.write("m-00002-of-00002.gguf", part(0, "b"));
  CHECK_THROWS_WITH_AS(File::open(first), doctest::Contains("'split.no' is 0, expected 1"), FileFormatError);
}

TEST_CASE("what is not a file") {
  const Folder folder;
  const auto path = folder.write("empty.gguf", "");
  CHECK_THROWS_WITH_AS(File::open(path), doctest::Contains("empty"), FileFormatError);
  CHECK_THROWS_WITH_AS(File::open(path.parent_path()), doctest::Contains("is a directory"), Error);
  CHECK_THROWS_WITH_AS(File::open(path / "x"), doctest::Contains("cannot open"), Error);
}

TEST_CASE("printable text") {
  CHECK(printable("blk.0.attn_q.weight") == "blk.0.attn_q.weight");
  CHECK(printable("gr\xC3\xBC\xC3\x9F \xE4\xB8\x96 \xF0\x9F\x91\x8B") ==
        "gr\xC3\xBC\xC3\x9F \xE4\xB8\x96 \xF0\x9F\x91\x8B");
  CHECK(printable(std::string_view("a\0b\n\x1b\x7f", 6)) == "a\\x00b\\x0a\\x1b\\x7f");
  CHECK(printable("\xC2\x9B") == "\\xc2\\x9b");                    // a control character of two bytes
  CHECK(printable("\xE2\x80\xAE") == "\\xe2\\x80\\xae");           // right-to-left override
  CHECK(printable("\xC0\xAF") == "\\xc0\\xaf");                    // overlong
  CHECK(printable("\xED\xA0\x80") == "\\xed\\xa0\\x80");           // a surrogate
  CHECK(printable("\xF4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");  // above 0x10FFFF
  CHECK(printable("\xE4\xB8") == "\\xe4\\xb8");                    // cut
  CHECK(printable(std::string(200, 'x')) == std::string(100, 'x') + "... (200 bytes)");
  CHECK(quoted("k") == "'k'");
}

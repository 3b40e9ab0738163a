// Metadata values: their types, and typed reads of values that have been validated.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace ringlm::gguf {

static_assert(std::endian::native == std::endian::little, "GGUF is read as little-endian, without swapping");

// clang-format off
enum class ValueType : std::uint32_t {
  U8 = 0, I8 = 1, U16 = 2, I16 = 3, U32 = 4, I32 = 5, F32 = 6, Bool = 7, String = 8, Array = 9,
  U64 = 10, I64 = 11, F64 = 12,
};
// clang-format on

// One metadata value, still in the mapping. For an array `element` is the type of its elements and
// `bytes` are the elements alone; for anything else element == type and count == 1.
// Strings lie in `bytes` as the file has them: u64 length, then that many bytes, one after another.
// Nothing in `bytes` is aligned: read numbers with load().
struct Value {
  ValueType type;
  ValueType element;
  std::uint64_t count;
  std::span<const std::byte> bytes;
};

std::string_view name(ValueType type) noexcept;   // "u32", "string", "array"
std::string describe(const Value& value);         // "u32", "array[string]"
std::size_t value_size(ValueType type) noexcept;  // bytes of a number or bool; 0 for strings and arrays
bool is_value_type(std::uint32_t id) noexcept;

template <typename T>
T load(const std::byte* from) noexcept {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Walks the strings of a string value or an array of strings. Call next() at most `count` times.
class StringReader {
 public:
  explicit StringReader(const Value& value) noexcept : at_(value.bytes.data()) {}

  std::string_view next() noexcept {
    const auto length = static_cast<std::size_t>(load<std::uint64_t>(at_));
    const std::string_view text(reinterpret_cast<const char*>(at_ + sizeof(std::uint64_t)), length);
    at_ += sizeof(std::uint64_t) + length;
    return text;
  }

 private:
  const std::byte* at_;
};

// Calls f with a null `const T*` for the C++ type T of `type`, and returns true; false for strings and
// arrays. Bool is one byte in the file, 0 or 1.
template <typename F>
bool with_number_type(ValueType type, F&& f) {
  const auto call = [&f]<typename T>(const T* tag) { return f(tag), true; };
  switch (type) {
    case ValueType::U8:
      return call(static_cast<const std::uint8_t*>(nullptr));
    case ValueType::I8:
      return call(static_cast<const std::int8_t*>(nullptr));
    case ValueType::U16:
      return call(static_cast<const std::uint16_t*>(nullptr));
    case ValueType::I16:
      return call(static_cast<const std::int16_t*>(nullptr));
    case ValueType::U32:
      return call(static_cast<const std::uint32_t*>(nullptr));
    case ValueType::I32:
      return call(static_cast<const std::int32_t*>(nullptr));
    case ValueType::U64:
      return call(static_cast<const std::uint64_t*>(nullptr));
    case ValueType::I64:
      return call(static_cast<const std::int64_t*>(nullptr));
    case ValueType::F32:
      return call(static_cast<const float*>(nullptr));
    case ValueType::F64:
      return call(static_cast<const double*>(nullptr));
    case ValueType::Bool:
      return call(static_cast<const bool*>(nullptr));
    case ValueType::String:
    case ValueType::Array:
      return false;
  }
  return false;
}

// Conversions for File::get_*. `where` (path and key) starts the message of the FileFormatError that is
// thrown for another type, or for a number that the target cannot hold.
std::uint64_t to_uint(const Value& value, const std::string& where);
std::int64_t to_int(const Value& value, const std::string& where);
double to_float(const Value& value, const std::string& where);
bool to_bool(const Value& value, const std::string& where);
std::string_view to_string(const Value& value, const std::string& where);
std::vector<std::string_view> to_strings(const Value& value, const std::string& where);
std::vector<std::int64_t> to_ints(const Value& value, const std::string& where);
std::vector<double> to_floats(const Value& value, const std::string& where);

}  // namespace ringlm::gguf

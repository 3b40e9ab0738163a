#include "gguf/values.h"

#include <limits>
#include <utility>

#include "ringlm/error.h"

namespace ringlm::gguf {
namespace {

[[noreturn]] void wrong_type(const Value& value, const std::string& where, std::string_view expected) {
  throw FileFormatError(where + " is " + describe(value) + ", expected " + std::string(expected));
}

template <typename T>
concept Integer = std::is_integral_v<T> && !std::is_same_v<T, bool>;

// The value as an integer of type To, or an error.
template <typename To>
To to_integer(const Value& value, const std::string& where, std::string_view expected) {
  To result{};
  const bool number = with_number_type(value.type, [&]<typename T>(const T*) {
    if constexpr (Integer<T>) {
      const T found = load<T>(value.bytes.data());
      if (!std::in_range<To>(found)) {
        throw FileFormatError(where + " is " + std::to_string(found) + " (" + describe(value) +
                              "), expected " + std::string(expected));
      }
      result = static_cast<To>(found);
    } else {
      wrong_type(value, where, expected);
    }
  });
  if (!number) wrong_type(value, where, expected);
  return result;
}

}  // namespace

std::string_view name(ValueType type) noexcept {
  switch (type) {
    case ValueType::U8:
      return "u8";
    case ValueType::I8:
      return "i8";
    case ValueType::U16:
      return "u16";
    case ValueType::I16:
      return "i16";
    case ValueType::U32:
      return "u32";
    case ValueType::I32:
      return "i32";
    case ValueType::F32:
      return "f32";
    case ValueType::Bool:
      return "bool";
    case ValueType::String:
      return "string";
    case ValueType::Array:
      return "array";
    case ValueType::U64:
      return "u64";
    case ValueType::I64:
      return "i64";
    case ValueType::F64:
      return "f64";
  }
  return "unknown";
}

std::string describe(const Value& value) {
  if (value.type != ValueType::Array) return std::string(name(value.type));
  return "array[" + std::string(name(value.element)) + "]";
}

std::size_t value_size(ValueType type) noexcept {
  std::size_t size = 0;
  with_number_type(type, [&]<typename T>(const T*) { size = sizeof(T); });
  return size;
}

bool is_value_type(std::uint32_t id) noexcept { return id <= static_cast<std::uint32_t>(ValueType::F64); }

std::uint64_t to_uint(const Value& value, const std::string& where) {
  return to_integer<std::uint64_t>(value, where, "an integer that is not negative");
}

std::int64_t to_int(const Value& value, const std::string& where) {
  return to_integer<std::int64_t>(value, where, "an integer below 2^63");
}

double to_float(const Value& value, const std::string& where) {
  double result = 0;
  const bool number = with_number_type(value.type, [&]<typename T>(const T*) {
    if constexpr (std::is_same_v<T, bool>) {
      wrong_type(value, where, "a number");
    } else {
      result = static_cast<double>(load<T>(value.bytes.data()));
    }
  });
  if (!number) wrong_type(value, where, "a number");
  return result;
}

bool to_bool(const Value& value, const std::string& where) {
  if (value.type != ValueType::Bool) wrong_type(value, where, "bool");
  return load<bool>(value.bytes.data());
}

std::string_view to_string(const Value& value, const std::string& where) {
  if (value.type != ValueType::String) wrong_type(value, where, "string");
  return StringReader(value).next();
}

std::vector<std::string_view> to_strings(const Value& value, const std::string& where) {
  if (value.type != ValueType::Array || value.element != ValueType::String) {
    wrong_type(value, where, "array[string]");
  }
  std::vector<std::string_view> strings;
  strings.reserve(static_cast<std::size_t>(value.count));
  StringReader reader(value);
  for (std::uint64_t i = 0; i < value.count; ++i) strings.push_back(reader.next());
  return strings;
}

std::vector<std::int64_t> to_ints(const Value& value, const std::string& where) {
  constexpr std::string_view expected = "an array of integers or bools";
  std::vector<std::int64_t> ints;
  if (value.type != ValueType::Array) wrong_type(value, where, expected);
  const bool number = with_number_type(value.element, [&]<typename T>(const T*) {
    if constexpr (std::is_integral_v<T>) {
      ints.reserve(static_cast<std::size_t>(value.count));
      for (std::uint64_t i = 0; i < value.count; ++i) {
        const T found = load<T>(value.bytes.data() + i * sizeof(T));
        if constexpr (std::is_same_v<T, std::uint64_t>) {
          if (!std::in_range<std::int64_t>(found)) {
            throw FileFormatError(where + ": element " + std::to_string(i) + " is " + std::to_string(found) +
                                  ", expected an integer below 2^63");
          }
        }
        ints.push_back(static_cast<std::int64_t>(found));
      }
    } else {
      wrong_type(value, where, expected);
    }
  });
  if (!number) wrong_type(value, where, expected);
  return ints;
}

std::vector<double> to_floats(const Value& value, const std::string& where) {
  constexpr std::string_view expected = "an array of numbers";
  std::vector<double> floats;
  if (value.type != ValueType::Array) wrong_type(value, where, expected);
  const bool number = with_number_type(value.element, [&]<typename T>(const T*) {
    if constexpr (std::is_same_v<T, bool>) {
      wrong_type(value, where, expected);
    } else {
      floats.reserve(static_cast<std::size_t>(value.count));
      for (std::uint64_t i = 0; i < value.count; ++i) {
        floats.push_back(static_cast<double>(load<T>(value.bytes.data() + i * sizeof(T))));
      }
    }
  });
  if (!number) wrong_type(value, where, expected);
  return floats;
}

}  // namespace ringlm::gguf

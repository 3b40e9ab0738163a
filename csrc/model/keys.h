// Numbers out of a file's metadata, each within bounds: what is not is a FileFormatError that names the key.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "gguf/file.h"
#include "ringlm/error.h"

namespace ringlm {

constexpr std::int64_t kMaxDim = 1 << 24;  // far above any model; products of two stay inside 64 bits

struct Keys {
  const gguf::File& file;
  std::string arch;

  std::string full(const char* key) const { return arch + "." + key; }

  // `who` needs it: "the architecture 'x'".
  void require(const char* key, const std::string& who) const {
    const std::string name = full(key);
    if (file.find(name)) return;
    throw FileFormatError("key '" + name + "' is missing; " + who + " needs it: convert the model again");
  }

  // A count that must be in [1, kMaxDim]. `fallback` < 0 makes the key required.
  std::int32_t count(const char* key, std::int64_t fallback = -1) const {
    const std::string name = full(key);
    const gguf::Value* v = file.find(name);
    const bool is_array = v && v->type == gguf::ValueType::Array;
    const auto found = is_array ? std::optional(same_for_all(name, *v)) : file.get_uint(name);
    if (fallback < 0) require(key, "the architecture '" + arch + "'");
    const std::uint64_t n = found.value_or(static_cast<std::uint64_t>(fallback));
    if (n < 1 || n > static_cast<std::uint64_t>(kMaxDim)) {
      throw FileFormatError("'" + name + "' is " + std::to_string(n) + "; expected 1 to " +
                            std::to_string(kMaxDim));
    }
    return static_cast<std::int32_t>(n);
  }

  // The value of every layer, where it is one and the same.
  static std::uint64_t same_for_all(const std::string& name, const gguf::Value& array) {
    const std::vector<std::int64_t> values = gguf::to_ints(array, name);
    if (values.empty() || values[0] < 0 ||
        std::ranges::any_of(values, [&](std::int64_t x) { return x != values[0]; })) {
      throw UnsupportedModelError(
          "'" + name + "' is an array of " + std::to_string(values.size()) +
          " values (one per layer); only models whose layers all have the same shape are supported");
    }
    return static_cast<std::uint64_t>(values[0]);
  }

  // A number that must be in [least, most].
  double number(const char* key, double fallback, double least, double most) const {
    const std::string name = full(key);
    const double x = file.get_float(name).value_or(fallback);
    if (!(x >= least && x <= most)) {
      throw FileFormatError("'" + name + "' is " + text(x) + "; expected " + text(least) + " to " +
                            text(most));
    }
    return x;
  }

  // The same, or 0.
  double number_or_0(const char* key, double fallback, double least, double most) const {
    return file.get_float(full(key)).value_or(fallback) == 0.0 ? 0.0 : number(key, fallback, least, most);
  }

  // 0 is how some files say that there is none.
  float scale(const char* key, double fallback) const {
    const double x = number_or_0(key, 0.0, 1e-9, 1e9);
    return static_cast<float>(x == 0.0 ? fallback : x);
  }

  // 0: none. In float32, capped values are off by 1e-7 of the cap.
  float cap(const char* key, double fallback) const {
    return static_cast<float>(number_or_0(key, fallback, 1e-3, 1e3));
  }

  // n of them, one for each layer.
  static std::vector<bool> flags(const std::string& name, const gguf::Value& array, std::size_t n) {
    const std::vector<std::int64_t> found = gguf::to_ints(array, "'" + name + "'");
    if (found.size() != n) {
      throw FileFormatError("'" + name + "' has " + std::to_string(found.size()) + " values; the " +
                            std::to_string(n) + " layers need one each");
    }
    for (const std::int64_t flag : found) {
      if (flag == 0 || flag == 1) continue;
      throw FileFormatError("'" + name + "' holds " + std::to_string(flag) +
                            "; expected 0 or 1 for each layer");
    }
    return {found.begin(), found.end()};
  }

  static std::string text(double x) {
    std::ostringstream out;
    out << x;
    return out.str();
  }
};

}  // namespace ringlm

#include "gguf/text.h"

#include <cstdint>

namespace ringlm::gguf {
namespace {

// Bytes of the UTF-8 character at the front of `text` and its code point, or {0, 0} when it is not one
// (overlong forms, surrogates and numbers above 0x10FFFF are not).
struct Character {
  std::size_t length;
  std::uint32_t code;
};

Character decode(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {1, first};
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return {0, 0};
  std::uint32_t code = first & (0x7Fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return {0, 0};
    code = code << 6 | (byte(i) & 0x3Fu);
  }
  const std::uint32_t least = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  if (code < least || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return {0, 0};
  return {length, code};
}

bool acts_on_terminal(std::uint32_t code) {
  const auto within = [code](std::uint32_t from, std::uint32_t to) { return code >= from && code <= to; };
  return code < 0x20 || within(0x7F, 0x9F) || within(0x200B, 0x200F) || within(0x2028, 0x202E) ||
         within(0x2060, 0x206F) || code == 0xFEFF;
}

void append_hex(std::string& out, char c) {
  constexpr char digits[] = "0123456789abcdef";
  const auto byte = static_cast<unsigned char>(c);
  out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
}

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  std::size_t at = 0;
  while (at < text.size() && at < limit) {
    const Character c = decode(text.substr(at));
    const std::size_t length = c.length == 0 ? 1 : c.length;
    if (c.length == 0 || acts_on_terminal(c.code)) {
      for (std::size_t i = 0; i < length; ++i) append_hex(out, text[at + i]);
    } else {
      out += text.substr(at, length);
    }
    at += length;
  }
  if (at < text.size()) out += "... (" + std::to_string(text.size()) + " bytes)";
  return out;
}

std::string quoted(std::string_view text) {
  std::string out(1, '\'');
  out += printable(text);
  out += '\'';
  return out;
}

std::string printable_path(const std::filesystem::path& path) {
  const std::string text = path.string();
  return printable(text, text.size());
}

}  // namespace ringlm::gguf

// Text out of a file, made fit for an error message.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>

namespace ringlm::gguf {

// Valid UTF-8 without anything that could act on a terminal: control characters, characters that change
// the direction of writing and bytes that are not UTF-8 become \xNN. Cut after `limit` bytes of `text`.
std::string printable(std::string_view text, std::size_t limit = 100);

// printable() in single quotes.
std::string quoted(std::string_view text);

// printable() of a whole path.
std::string printable_path(const std::filesystem::path& path);

}  // namespace ringlm::gguf

// A whole file, mapped read-only.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace ringlm::gguf {

class Mapping {
 public:
  // Throws Error, naming the path and the reason, when the file cannot be opened or mapped.
  // An empty file gives empty bytes(). A file that is cut or rewritten while mapped is beyond protection:
  // replace model files by renaming, never in place.
  explicit Mapping(const std::filesystem::path& path);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace ringlm::gguf

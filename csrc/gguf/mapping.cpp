#include "gguf/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <string>
#include <system_error>
#include <utility>

#include "gguf/text.h"
#include "ringlm/error.h"

namespace ringlm::gguf {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what, int code) {
  throw Error(printable_path(path) + ": " + what + ": " + std::generic_category().message(code));
}

void unmap(std::span<const std::byte> bytes) noexcept {
  if (!bytes.empty()) ::munmap(const_cast<std::byte*>(bytes.data()), bytes.size());
}

}  // namespace

Mapping::Mapping(const std::filesystem::path& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer. It means nothing for an ordinary file.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) fail(path, "cannot open the file", errno);
  struct stat status{};
  if (::fstat(file.fd, &status) != 0) fail(path, "cannot read the file's size", errno);
  if (S_ISDIR(status.st_mode)) throw Error(printable_path(path) + ": is a directory, expected a GGUF file");
  if (!S_ISREG(status.st_mode))
    throw Error(printable_path(path) + ": is not an ordinary file, so it cannot be mapped");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size == 0) return;  // mmap refuses it; the reader reports an empty file
  if (size > std::numeric_limits<std::size_t>::max()) fail(path, "cannot map the file", EFBIG);
  void* data = ::mmap(nullptr, static_cast<std::size_t>(size), PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (data == MAP_FAILED) fail(path, "cannot map " + std::to_string(size) + " bytes of the file", errno);
  bytes_ = {static_cast<const std::byte*>(data), static_cast<std::size_t>(size)};
}

Mapping::~Mapping() { unmap(bytes_); }

Mapping::Mapping(Mapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    unmap(bytes_);
    bytes_ = std::exchange(other.bytes_, {});
  }
  return *this;
}

}  // namespace ringlm::gguf

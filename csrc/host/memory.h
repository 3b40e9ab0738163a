// Memory that is asked for once, when a model or a session opens, and all written then: running out happens
// then or never.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace ringlm::host {

// Bytes that this process can still take without the kernel having to kill somebody: the machine's
// available memory, or what is left of its control groups' limits where that is less.
std::size_t available_memory();

// "1.50 GiB", "12.0 MiB", "640 bytes".
std::string format_bytes(std::size_t n);

// Bytes of all regions that there are now.
std::size_t mapped_bytes();

// Pages of a read-only mapping that lie wholly in `bytes` leave this process's memory; whoever reads them
// again gets them from the file.
void drop_pages(std::span<const std::byte> bytes) noexcept;

// A zeroed, page-aligned anonymous mapping, in huge pages where the system has some.
class Region {
 public:
  enum class Pages {
    Present,  // every page is there when the constructor returns
    Absent,   // each comes when it is first written: by several threads at once, say
  };

  Region() = default;
  // `what` names the use. Throws OutOfMemory when the system refuses. Compare with available_memory() first:
  // the system promises more than it has, and ends the process when it cannot keep the promise.
  Region(std::size_t bytes, const std::string& what, Pages pages = Pages::Present);
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;

  std::span<std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace ringlm::host

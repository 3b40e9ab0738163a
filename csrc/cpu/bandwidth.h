// How fast this machine reads memory: the limit that a decode step is compared with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ringlm::cpu {

// A buffer and the fastest way to read all of it once, with every thread of a team.
//
// Each thread reads its share of a part front to back, in one to four streams with or without software
// prefetch, every byte once, with the widest loads that the processor has. Which of these patterns is fastest
// here is found out when the reader is made.
class MemoryReader {
 public:
  // bytes: rounded up to a multiple of 256. The buffer lies in huge pages where the system gives them, and is
  // written once. Throws InvalidArgument and OutOfMemory.
  MemoryReader(std::size_t bytes, int n_threads);
  ~MemoryReader();
  MemoryReader(const MemoryReader&) = delete;
  MemoryReader& operator=(const MemoryReader&) = delete;

  std::size_t bytes() const;
  int n_threads() const;

  // Seconds of each of `passes` passes over the buffer. A pass goes in `parts` equal parts with a barrier of
  // all threads behind each: what a decode step would be that only read its weights, operation by operation.
  std::vector<double> read(int passes, int parts = 1);

  // Sum, modulo 2^64, of the buffer's 64-bit words as the last pass found them. Word i is word(i).
  std::uint64_t sum() const;
  static constexpr std::uint64_t word(std::uint64_t i) { return i * 0x9e3779b97f4a7c15u + 1; }

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace ringlm::cpu

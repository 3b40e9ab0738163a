// Device memory and the shared memory of the running block, and what of either an access may touch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "simt/races.h"
#include "simt/simt.h"

namespace simt {

struct Thread;

constexpr unsigned char kPoison = 0xff;  // a NaN in every floating type

struct Allocation {
  std::string name;
  std::unique_ptr<std::byte[]> storage;  // guard, the buffer, guard
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  bool has(const void* address, int n) const;
  BufferCount count;
  std::vector<std::uint8_t> touched;  // per byte: 1 read, 2 written
  Cells cells{nullptr, &std::free};   // race build: per byte
};

class GlobalMemory {
 public:
  void* allocate(std::size_t bytes, std::string name);
  void release(void* memory);
  Allocation* find(const void* address);  // whose buffer or guard has it, or null
  void check_guards();                    // throws Fault
  std::map<std::uintptr_t, Allocation>& all() { return by_base_; }

 private:
  std::map<std::uintptr_t, Allocation> by_base_;
  Allocation* last_ = nullptr;  // found
};

class SharedMemory {
 public:
  static constexpr std::size_t kLargest = 256 * 1024;  // of a block, on any device and more

  SharedMemory();
  void begin_block(std::size_t dynamic_bytes, std::size_t limit);
  std::byte* dynamic(const char* name);
  // The array of a tag: made by the first thread that asks.
  std::byte* array(const void* tag, const char* name, std::size_t bytes, std::size_t align,
                   const Place& place);

  bool holds(const void* address) const;
  std::size_t offset(const void* address) const;
  // Fails unless the bytes are of one array and no copy into them is under way.
  void check(const Thread& thread, const Place& place, const char* what, const void* address, int bytes);
  void set_in_flight(const void* address, int bytes, bool in_flight);
  Text name_of(const void* address) const;
  Cells cells;  // race build: per byte

 private:
  struct Array {
    const void* tag;
    std::string name;
    std::size_t begin, bytes;
  };
  std::byte* carve(const void* tag, const char* name, std::size_t bytes, std::size_t align);

  std::byte* arena_;
  std::vector<std::uint8_t> state_;  // per byte: see memory.cpp
  std::vector<Array> arrays_;
  std::size_t top_ = 0, used_ = 0, limit_ = 0;
};

// "byte 4 of shared array s (256 bytes)", "byte 80 of buffer x (80 bytes)".
Text name_of(const void* address);

}  // namespace simt

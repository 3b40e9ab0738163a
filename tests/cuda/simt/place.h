// Where an access or collective stands: a source line, or code whose line the debug information has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "simt/site.h"

namespace simt {

struct Place {
  const char* file = nullptr;
  int line = 0;
  const void* code = nullptr;  // when there is no file: a return address

  Place() = default;
  Place(const Site& at) : file(at.file_name()), line(static_cast<int>(at.line())) {}
  explicit Place(const void* return_address) : code(return_address) {}
  friend bool operator==(const Place&, const Place&) = default;
};

struct PlaceHash {
  std::size_t operator()(const Place& place) const {
    const auto file = reinterpret_cast<std::uintptr_t>(place.file),
               code = reinterpret_cast<std::uintptr_t>(place.code);
    return (file ^ code) * 31 + static_cast<std::size_t>(place.line);
  }
};

struct Line {
  std::string file;  // without its folders; empty when unknown
  int line = 0;
};
Line resolve(const Place& place);

// A short text without a destructor: fail() drops the frames of a kernel as they are.
struct Text {
  char chars[256];
  const char* c_str() const { return chars; }
};
Text name_of(const Place& place);  // "file:line"

}  // namespace simt

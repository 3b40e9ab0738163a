// Every error that ringlm throws. A message says what was found, what was expected and what to do.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace ringlm {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The bytes of a file contradict its format: truncated, altered, or not that kind of file.
struct FileFormatError : Error {
  using Error::Error;
};

// The file is well formed, but ringlm cannot run what it describes.
struct UnsupportedModelError : Error {
  using Error::Error;
};

// The tokens do not fit into what is left of the context. Nothing was computed.
struct ContextOverflow : Error {
  using Error::Error;
};

// Memory for a model or a session is not there. Nothing was kept.
struct OutOfMemory : Error {
  using Error::Error;
};

// A step was cancelled. `consumed` tokens of the call are in the cache; the rest is not.
struct Cancelled : Error {
  Cancelled(const std::string& what, std::size_t consumed_) : Error(what), consumed(consumed_) {}
  std::size_t consumed;
};

// A device (GPU, driver, thread team) refused or failed.
struct DeviceError : Error {
  using Error::Error;
};

// NaN or infinity where a finite number has to be.
struct NumericError : Error {
  using Error::Error;
};

// An argument is out of its range.
struct InvalidArgument : Error {
  using Error::Error;
};

// The object cannot do this now: closed, busy in another thread, or carried over a fork.
struct StateError : Error {
  using Error::Error;
};

}  // namespace ringlm

// From GGUF metadata to a Config. Adding an architecture touches config.cpp and the table of tensor names
// in weights.cpp.
#pragma once

#include "gguf/file.h"
#include "ringlm/config.h"

namespace ringlm {

// Throws UnsupportedModelError for an architecture or a feature that ringlm does not run, FileFormatError for
// keys that are missing, of the wrong type, or contradict each other; both name the key.
Config read_config(const gguf::File& file);

}  // namespace ringlm

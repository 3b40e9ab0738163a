// From GGUF metadata to a Config. Adding an architecture touches the table in architecture.cpp, and
// weights.cpp where its tensors have other names.
#pragma once

#include "gguf/file.h"
#include "ringlm/config.h"

namespace ringlm {

// Throws UnsupportedModelError for an architecture or a feature that ringlm does not run, FileFormatError for
// keys that are missing, of the wrong type, or contradict each other; both name the key.
Config read_config(const gguf::File& file);

// The angles of all layers but those that have their own for a window, instead of the file's. A base or
// original length of 0 stays the file's; a factor of 0 is 1, and for LongRoPE the trained length over the
// original one. Throws InvalidArgument for a number out of range.
void set_rope(Config& config, const Rope& rope);

}  // namespace ringlm

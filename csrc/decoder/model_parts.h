#pragma once

#include <sys/types.h>

#include <memory>

#include "gguf/file.h"
#include "model/rope.h"
#include "model/weights.h"
#include "ops/ops.h"
#include "ringlm/model.h"

namespace ringlm {

struct Model::Parts {
  gguf::File file;
  Config config;
  Weights weights;
  Ropes ropes;
  std::unique_ptr<Ops> ops;
  ::pid_t owner;  // the process whose threads compute

  bool in_this_process() const;
  // Throws StateError in a child of fork(), into which the threads did not follow.
  void check_process() const;
};

}  // namespace ringlm

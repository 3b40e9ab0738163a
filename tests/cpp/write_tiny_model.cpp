// Copies the tests' small model to a path and prints the ids with which the reference backend goes on,
// greedily:
//   write_tiny_model out.gguf COUNT TOKEN...
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <vector>

#include "ringlm/model.h"
#include "ringlm/sampler.h"
#include "ringlm/session.h"
#include "tiny_model.h"

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const tiny::File file;
  std::filesystem::copy_file(file.path(), argv[1], std::filesystem::copy_options::overwrite_existing);

  ringlm::Session session(ringlm::Model::open(argv[1], {.backend = "reference"}));
  std::vector<std::int32_t> tokens;
  for (int i = 3; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  session.prefill(tokens);
  for (int left = std::atoi(argv[2]); left > 0; --left) {
    const std::int32_t token = ringlm::argmax(session.logits());
    std::printf("%d%s", token, left > 1 ? " " : "\n");
    if (left > 1) session.decode(token);
  }
}

// Continues a prompt of token ids, greedily:   continue_tokens model.gguf 16 1 504 3575
#include <ringlm/error.h>
#include <ringlm/model.h>
#include <ringlm/sampler.h>
#include <ringlm/session.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace {

std::int32_t number(const char* text) {
  std::int32_t n = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, n);
  if (error != std::errc() || stop != end)
    throw ringlm::InvalidArgument(std::string("'") + text + "' is not a number");
  return n;
}

void continue_tokens(const char* path, std::int32_t n, std::span<char*> prompt) {
  const auto model = ringlm::Model::open(path);
  ringlm::Session session(model);
  ringlm::Sampler sampler(model->config().n_vocab, {.temperature = 0});

  std::vector<std::int32_t> tokens;
  for (const char* text : prompt) tokens.push_back(number(text));
  session.prefill(tokens);
  for (std::int32_t i = 0; i < n; ++i) {
    const std::int32_t token = session.sample(sampler);
    std::printf("%d%s", token, i + 1 < n ? " " : "\n");
    if (i + 1 < n) session.decode(token);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s model.gguf COUNT TOKEN...\n", argv[0]);
    return 2;
  }
  try {
    continue_tokens(argv[1], number(argv[2]), {argv + 3, argv + argc});
  } catch (const ringlm::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}

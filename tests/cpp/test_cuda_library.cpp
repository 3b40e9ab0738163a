// Finding and loading the CUDA backend, with libraries that have no CUDA in them (fake_cuda_library.cpp).
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "decoder/cuda_library.h"
#include "ringlm/error.h"
#include "ringlm/session.h"
#include "tiny_model.h"

using namespace ringlm;
namespace fs = std::filesystem;

namespace {

// The message of the DeviceError that this throws.
template <class F>
std::string refused(F f) {
  try {
    f();
  } catch (const DeviceError& e) {
    return e.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Variable {
  explicit Variable(const std::string& value) { ::setenv("RINGLM_CUDA_LIBRARY", value.c_str(), 1); }
  ~Variable() { ::unsetenv("RINGLM_CUDA_LIBRARY"); }
};

std::vector<float> logits(const fs::path& model, const std::string& backend) {
  Session session(Model::open(model, {.backend = backend}), {.n_ctx = 32});
  const std::int32_t tokens[] = {3, 1, 4, 1, 5};
  session.prefill(tokens);
  const auto row = session.logits();
  return {row.begin(), row.end()};
}

}  // namespace

// First: what one case loads stays loaded.
TEST_CASE("a ringlm without the library says so, and is otherwise well") {
  ::unsetenv("RINGLM_CUDA_LIBRARY");
  const tiny::File file;
  const std::string message = refused([&] { Model::open(file.path(), {.backend = "cuda"}); });
  CHECK(has(message, "built without CUDA"));
  CHECK(has(message, "RINGLM_CUDA=ON"));
  CHECK(has(message, "device='cpu'"));
  CHECK(has(message, fs::canonical("/proc/self/exe").parent_path().string()));
  CHECK(cuda_library_paths().front() == fs::canonical("/proc/self/exe").parent_path() / "libringlm_cuda.so");
  CHECK(logits(file.path(), "cpu").size() == 61);

  const Variable named("/nowhere/lib.so");
  CHECK(has(refused([] { cuda_library(); }), "RINGLM_CUDA_LIBRARY is '/nowhere/lib.so'"));
}

TEST_CASE("what is no library, or another one, is refused") {
  const fs::path text = fs::temp_directory_path() / ("ringlm-test-" + std::to_string(::getpid()) + ".so");
  std::ofstream(text) << "not a library";
  CHECK(has(refused([&] { load_cuda_library(text); }), "does not load: " + text.string()));
  fs::remove(text);
  CHECK(has(refused([] { load_cuda_library("libm.so.6"); }), "is not ringlm's CUDA backend"));
  const std::string message = refused([] { load_cuda_library(OTHER_BUILD); });
  CHECK(has(message, "comes from another build of ringlm: it is 0.0.1-stale, and this is " RINGLM_BUILD));
}

TEST_CASE("errors keep their types on the way out of the library") {
  const CudaLibrary library = load_cuda_library(THIS_BUILD);
  CHECK(library.path == fs::path(THIS_BUILD));
  CHECK(std::string(library.entry->archs) == "75 87");
  Config config;
  const Weights weights;
  config.name = "OutOfMemory";
  CHECK_THROWS_WITH_AS(library.entry->open(config, weights), "too little", OutOfMemory);
  config.name = "DeviceError";
  CHECK_THROWS_WITH_AS(library.entry->open(config, weights), "no driver", DeviceError);
  config.name = "UnsupportedModelError";
  CHECK_THROWS_WITH_AS(library.entry->open(config, weights), "no kernel", UnsupportedModelError);
  CHECK_THROWS_AS(library.entry->open(config, weights), Error);  // as its base, too
}

TEST_CASE("a session computes with the backend of the library") {
  const Variable named(THIS_BUILD);
  const tiny::File file;
  CHECK(logits(file.path(), "cuda") == logits(file.path(), "reference"));
  CHECK(cuda_library().path == fs::path(THIS_BUILD));
}

#ifdef REAL_LIBRARY
TEST_CASE("the real library comes from this build and says why it cannot run, if it cannot") {
  const CudaLibrary library = load_cuda_library(REAL_LIBRARY);
  CHECK_FALSE(std::string(library.entry->archs).empty());
  const tiny::File file;
  const Config config;
  const Weights weights;
  const std::string message = refused([&] { library.entry->open(config, weights); });
  MESSAGE(message);
  if (!fs::exists("/dev/nvidiactl") && !fs::exists("/dev/nvmap")) {
    CHECK(has(message, "NVIDIA driver"));
    CHECK(has(message, "cudaError"));
    CHECK(has(message, "device='cpu'"));
  }
}
#endif

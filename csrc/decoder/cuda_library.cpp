#include "decoder/cuda_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string_view>
#include <system_error>

#include "ringlm/error.h"

namespace ringlm {
namespace {

namespace fs = std::filesystem;

const char* const kRebuild = "pip install . -C cmake.define.RINGLM_CUDA=ON";

// The module or program that this code was linked into, and what it links to.
std::vector<fs::path> objects_of_this_code() {
  Dl_info info{};
  fs::path object;
  if (dladdr(reinterpret_cast<const void*>(&cuda_library), &info) != 0 && info.dli_fname != nullptr) {
    object = info.dli_fname;
  }
  std::error_code ignored;
  if (!object.is_absolute()) object = fs::read_symlink("/proc/self/exe", ignored);  // as it was called
  fs::path target = fs::canonical(object, ignored);
  if (target.empty() || target.parent_path() == object.parent_path()) return {object};
  return {object, target};
}

// A name without a folder is the dynamic linker's to find.
bool may_be_there(const fs::path& path) {
  std::error_code ignored;
  return !path.has_parent_path() || fs::exists(path, ignored);
}

CudaLibrary find_cuda_library() {
  if (const char* named = std::getenv("RINGLM_CUDA_LIBRARY"); named != nullptr && *named != '\0') {
    if (!may_be_there(named)) {
      throw DeviceError(
          "RINGLM_CUDA_LIBRARY is '" + std::string(named) +
          "', and there is no such file: name libringlm_cuda.so, unset it, or use device='cpu'");
    }
    return load_cuda_library(named);
  }
  for (const fs::path& path : cuda_library_paths()) {
    if (may_be_there(path)) return load_cuda_library(path);
  }
  if (dlopen(cuda::kLibraryFile, RTLD_NOW | RTLD_LOCAL)) return load_cuda_library(cuda::kLibraryFile);
  throw DeviceError("this ringlm was built without CUDA: there is no " + std::string(cuda::kLibraryFile) +
                    " in " + cuda_library_paths().front().parent_path().string() + ". Install it with '" +
                    kRebuild + "' (needs the CUDA toolkit), or use device='cpu'");
}

}  // namespace

std::vector<fs::path> cuda_library_paths() {
  std::vector<fs::path> paths;
  for (const fs::path& object : objects_of_this_code()) {
    paths.push_back(object.parent_path() / cuda::kLibraryFile);
  }
  return paths;
}

CudaLibrary load_cuda_library(const fs::path& path) {
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw DeviceError("the CUDA backend does not load: " + std::string(dlerror()) +
                      "; install ringlm again with '" + kRebuild + "', or use device='cpu'");
  }
  const auto close_and_throw = [&](const std::string& what) {
    dlclose(handle);
    throw DeviceError(what + "; install both again with '" + kRebuild + "', or use device='cpu'");
  };
  const auto entry = reinterpret_cast<decltype(&ringlm_cuda_library)>(dlsym(handle, cuda::kLibraryEntry));
  if (entry == nullptr) {
    close_and_throw(path.string() + " is not ringlm's CUDA backend: it has no " + cuda::kLibraryEntry);
  }
  const cuda::Library* const library = entry();
  if (std::string_view(library->build) != RINGLM_BUILD) {
    close_and_throw(path.string() + " comes from another build of ringlm: it is " + library->build +
                    ", and this is " RINGLM_BUILD);
  }
  Dl_info info{};
  const bool known = dladdr(reinterpret_cast<const void*>(entry), &info) != 0 && info.dli_fname != nullptr;
  return {known ? fs::path(info.dli_fname) : path, library};
}

const CudaLibrary& cuda_library() {
  static const CudaLibrary library = find_cuda_library();  // tried again by the next call where this throws
  return library;
}

}  // namespace ringlm

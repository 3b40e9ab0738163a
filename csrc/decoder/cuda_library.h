// Finds and loads the CUDA backend, a library of its own (cuda/library.h).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cuda/library.h"

namespace ringlm {

struct CudaLibrary {
  std::filesystem::path path;
  const cuda::Library* entry;
};

// The process's, loaded by the first call that finds it and never unloaded: the file that RINGLM_CUDA_LIBRARY
// names, or libringlm_cuda.so beside the module or program that holds this code, or where the dynamic linker
// finds it. Throws DeviceError where it is not there, does not load, or comes from another build.
const CudaLibrary& cuda_library();

// From this file, or this name for the dynamic linker. Throws DeviceError.
CudaLibrary load_cuda_library(const std::filesystem::path& path);

// Where it may lie, the nearest first.
std::vector<std::filesystem::path> cuda_library_paths();

}  // namespace ringlm

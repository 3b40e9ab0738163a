// What the tests of kernels need of a GPU besides simt/simt.h.
#pragma once

#include <string>

namespace gpu {

// Why there is none to run on, or nothing.
std::string missing();

// Name, architecture, driver and runtime, in one line.
std::string description();

// What went wrong on the device since the last call, or nothing; `lost`: it will take no more calls.
std::string error(bool& lost);

// Prints one line of JSON for each measurement: {"name", "bytes", "flops", "seconds"}, of one launch. The
// first is a copy from device memory to device memory, in `bytes` read and written.
void measure();

}  // namespace gpu

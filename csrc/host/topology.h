// Which processors are worth a thread each. Linux counts hardware threads; two of them on one core share its
// arithmetic, and a small core next to big ones would hold them up at every barrier.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace ringlm::host {

// Processors in the affinity mask of the calling thread, ascending; those that the system has, where the mask
// cannot be read.
std::vector<int> allowed_cpus();

// One of `allowed` for each physical core, without the small cores of a hybrid part: those that
// - Intel lists under /sys/devices/cpu_atom and not under cpu_core, or
// - have less than 3/4 of the largest cpu_capacity (the kernel's estimate, 1024 for the fastest core), or,
//   where that is not known, less than 4/5 of the highest maximum frequency.
// What is absent or makes no sense in /sys tells nothing: the processor then counts. Not empty unless
// `allowed` is. `root` stands for "/", for tests.
std::vector<int> compute_cores(std::span<const int> allowed, const std::string& root = "");

}  // namespace ringlm::host

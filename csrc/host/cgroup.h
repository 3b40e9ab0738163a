// What the control groups (cgroups) of this process allow it, version 1 and 2. A limit may stand in its own
// group or in any group above; inside a container the own group is usually the root of what can be seen.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ringlm::host {

// Bytes that can still be taken, or nothing when there is no limit. Pages of files (mapped weights above all)
// count as free: the kernel drops them before it refuses. `root` stands for "/", for tests.
std::optional<std::uint64_t> cgroup_memory(const std::string& root = "");

// Processors' worth of time (quota / period), or nothing when there is no limit.
std::optional<double> cgroup_cpus(const std::string& root = "");

}  // namespace ringlm::host

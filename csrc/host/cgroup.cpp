#include "host/cgroup.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

namespace ringlm::host {
namespace {

struct Group {
  std::string folder;
  bool v2;
};

// The process's group for a controller and every group above it. A line of /proc/self/cgroup is
// "4:memory:/a/b" in version 1 and "0::/a/b" in version 2.
std::vector<Group> groups(const std::string& root, std::string_view controller) {
  std::vector<Group> found;
  std::ifstream in(root + "/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = names == ",,";
    if (!v2 && names.find("," + std::string(controller) + ",") == std::string::npos) continue;
    const std::string mount = root + "/sys/fs/cgroup" + (v2 ? "" : "/" + std::string(controller));
    std::string path = line.substr(second + 1);
    while (!path.empty() && path != "/") {
      found.push_back({mount + path, v2});
      path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
    found.push_back({mount, v2});
  }
  return found;
}

std::optional<std::uint64_t> number(const std::string& path) {
  std::ifstream in(path);
  std::uint64_t n = 0;
  if (in >> n) return n;
  return std::nullopt;  // absent, or "max"
}

// Bytes of file pages, from memory.stat. Version 1 lists its own pages under the plain names and those of the
// whole tree, which the limit is about, under total_*.
std::uint64_t file_pages(const Group& g) {
  std::ifstream in(g.folder + "/memory.stat");
  const std::string prefix = g.v2 ? "" : "total_";
  std::uint64_t sum = 0;
  std::string key;
  for (std::uint64_t n = 0; in >> key >> n;) {
    if (key == prefix + "inactive_file" || key == prefix + "active_file") sum += n;
  }
  return sum;
}

}  // namespace

std::optional<std::uint64_t> cgroup_memory(const std::string& root) {
  constexpr std::uint64_t unlimited = std::uint64_t{1} << 62;  // version 1 writes about 2^63
  std::optional<std::uint64_t> least;
  for (const Group& g : groups(root, "memory")) {
    const auto limit = number(g.folder + (g.v2 ? "/memory.max" : "/memory.limit_in_bytes"));
    const auto used = number(g.folder + (g.v2 ? "/memory.current" : "/memory.usage_in_bytes"));
    if (!limit || !used || *limit >= unlimited) continue;
    const std::uint64_t held = *used - std::min(*used, file_pages(g));
    const std::uint64_t left = *limit - std::min(*limit, held);
    least = std::min(least.value_or(left), left);
  }
  return least;
}

std::optional<double> cgroup_cpus(const std::string& root) {
  std::optional<double> least;
  for (const Group& g : groups(root, "cpu")) {
    double quota = 0, period = 0;  // microseconds; no limit is "max" in version 2 and -1 in version 1
    if (g.v2) {
      std::ifstream in(g.folder + "/cpu.max");
      if (!(in >> quota >> period)) continue;
    } else {
      std::ifstream(g.folder + "/cpu.cfs_quota_us") >> quota;
      std::ifstream(g.folder + "/cpu.cfs_period_us") >> period;
    }
    if (!(quota > 0 && period > 0)) continue;
    least = std::min(least.value_or(quota / period), quota / period);
  }
  return least;
}

}  // namespace ringlm::host

#include "host/topology.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <thread>

namespace ringlm::host {
namespace {

// A list as the kernel writes it: "0-3,8,10-11".
struct CpuList {
  std::vector<std::pair<int, int>> ranges;  // first, last

  bool holds(int cpu) const {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const auto& r) { return r.first <= cpu && cpu <= r.second; });
  }
  int lowest() const { return std::min_element(ranges.begin(), ranges.end())->first; }
};

std::optional<std::string> first_line(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  if (std::getline(in, line)) return line;
  return std::nullopt;
}

// A number at the front of `text`, taken off it.
std::optional<int> take_number(std::string_view& text) {
  int n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  if (error != std::errc() || n < 0) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return n;
}

bool take(std::string_view& text, char c) {
  if (text.empty() || text.front() != c) return false;
  text.remove_prefix(1);
  return true;
}

// Nothing when the file is absent, empty or not such a list.
std::optional<CpuList> read_list(const std::string& path) {
  const std::optional<std::string> line = first_line(path);
  if (!line) return std::nullopt;
  std::string_view text = *line;
  CpuList list;
  do {
    const std::optional<int> first = take_number(text);
    const std::optional<int> last = take(text, '-') ? take_number(text) : first;
    if (!first || !last || *last < *first) return std::nullopt;
    list.ranges.emplace_back(*first, *last);
  } while (take(text, ','));
  if (!text.empty()) return std::nullopt;
  return list;
}

std::optional<int> read_number(const std::string& path) {
  const std::optional<std::string> line = first_line(path);
  if (!line) return std::nullopt;
  std::string_view text = *line;
  const std::optional<int> n = take_number(text);
  return n && *n > 0 && text.empty() ? n : std::nullopt;
}

// Leaves the processors whose figure, from a file of each, is at least `part` of the largest; all of them
// where one has no such file. False then.
bool keep_fast(std::vector<int>& cpus, const std::string& folder, const std::string& file, double part) {
  std::vector<int> figures;
  for (const int cpu : cpus) {
    const std::optional<int> n = read_number(folder + std::to_string(cpu) + file);
    if (!n) return false;
    figures.push_back(*n);
  }
  const double least = part * *std::max_element(figures.begin(), figures.end());
  auto figure = figures.begin();
  std::erase_if(cpus, [&](int) { return *figure++ < least; });
  return true;
}

}  // namespace

std::vector<int> allowed_cpus() {
  // The call fails as long as the mask is smaller than the kernel's, which holds up to 8192 today.
  for (int most = 1024; most <= 1 << 20; most *= 4) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(most),
                                                               [](cpu_set_t* p) { CPU_FREE(p); });
    const std::size_t bytes = CPU_ALLOC_SIZE(most);
    if (!set) break;
    if (::sched_getaffinity(0, bytes, set.get()) == 0) {
      std::vector<int> cpus;
      for (int cpu = 0; cpu < most; ++cpu) {
        if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set.get())) cpus.push_back(cpu);
      }
      return cpus;
    }
    if (errno != EINVAL) break;
  }
  std::vector<int> cpus(std::max(1u, std::thread::hardware_concurrency()));
  std::iota(cpus.begin(), cpus.end(), 0);
  return cpus;
}

std::vector<int> compute_cores(std::span<const int> allowed, const std::string& root) {
  const std::string devices = root + "/sys/devices/", folder = devices + "system/cpu/cpu";
  std::vector<int> cpus(allowed.begin(), allowed.end());
  if (cpus.empty()) return cpus;

  const std::optional<CpuList> big = read_list(devices + "cpu_core/cpus");
  const std::optional<CpuList> small = read_list(devices + "cpu_atom/cpus");
  if (big && small && std::any_of(cpus.begin(), cpus.end(), [&](int cpu) { return big->holds(cpu); })) {
    std::erase_if(cpus, [&](int cpu) { return small->holds(cpu) && !big->holds(cpu); });
  }
  if (!keep_fast(cpus, folder, "/cpu_capacity", 0.75)) {
    keep_fast(cpus, folder, "/cpufreq/cpuinfo_max_freq", 0.8);
  }

  std::set<int> cores;  // by their first hardware thread, which need not be an allowed one
  std::erase_if(cpus, [&](int cpu) {
    const std::string topology = folder + std::to_string(cpu) + "/topology/";
    std::optional<CpuList> threads = read_list(topology + "core_cpus_list");
    if (!threads) threads = read_list(topology + "thread_siblings_list");  // its name before Linux 5.3
    return !cores.insert(threads && threads->holds(cpu) ? threads->lowest() : cpu).second;
  });
  return cpus;
}

}  // namespace ringlm::host

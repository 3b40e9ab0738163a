// The thread team, and what it reads about the machine.
#include "cpu/team.h"

#include <doctest/doctest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "host/cgroup.h"
#include "host/memory.h"
#include "host/topology.h"
#include "ringlm/error.h"

using namespace ringlm;
using cpu::Team;

TEST_CASE("every thread runs once per run, and run() waits for all") {
  for (int n = 1; n <= 8; ++n) {
    Team team(n);
    REQUIRE(team.size() == n);
    std::vector<int> count(static_cast<std::size_t>(n));  // not atomic: each thread has its own
    for (int i = 1; i <= 300; ++i) {
      team.run([&](int thread) { ++count[static_cast<std::size_t>(thread)]; });
      REQUIRE(std::accumulate(count.begin(), count.end(), 0) == i * n);
    }
  }
}

TEST_CASE("what a thread wrote before a barrier, every thread reads behind it") {
  for (const int n : {1, 2, 3, 5, 8}) {
    Team team(n);
    std::vector<int> seen(static_cast<std::size_t>(n));
    std::vector<int> wrong(static_cast<std::size_t>(n));
    for (int i = 0; i < 20; ++i) {
      team.run([&](int thread) {
        const auto me = static_cast<std::size_t>(thread);
        for (int round = 1; round <= 10; ++round) {
          seen[me] = i * 100 + round;
          team.barrier();
          for (const int s : seen) wrong[me] += s != i * 100 + round;
          team.barrier();
        }
      });
    }
    CHECK(std::accumulate(wrong.begin(), wrong.end(), 0) == 0);
  }
}

TEST_CASE("threads that had gone to sleep wake up") {
  Team team(3);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // longer than anybody spins
    std::atomic<int> count{0};
    team.run([&](int thread) {
      if (thread == 1) std::this_thread::sleep_for(std::chrono::microseconds(200));
      ++count;
    });
    REQUIRE(count == 3);
  }
}

TEST_CASE("callers from several threads take turns") {
  Team team(2);
  int inside = 0, total = 0;  // guarded by run() alone
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        team.run([&](int thread) {
          if (thread == 0) ++inside;
          team.barrier();
          if (thread == 1) total += inside;
          team.barrier();
          if (thread == 0) --inside;
        });
      }
    });
  }
  for (std::thread& t : callers) t.join();
  CHECK(total == 600);
}

TEST_CASE("a team goes away idle, right after a run, and at once") {
  for (int i = 0; i < 30; ++i) Team unused(4);
  for (int i = 0; i < 30; ++i) {
    Team team(4);
    team.run([](int) {});
  }
  Team team(4);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

TEST_CASE("destruction in a child of fork does not wait for threads that are not there") {
  auto team = std::make_unique<Team>(3);
  team->run([](int) {});
  const ::pid_t child = ::fork();
  if (child == 0) {
    ::alarm(5);
    team.reset();
    ::_exit(0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  int sum = 0;
  team->run([&](int thread) {
    if (thread == 2) sum = 7;
  });
  CHECK(sum == 7);
}

TEST_CASE("shares cover everything once, in order") {
  for (const int count : {1, 2, 3, 7, 16}) {
    for (const std::int64_t n : {0, 1, 2, 15, 16, 17, 1000}) {
      std::int64_t next = 0;
      for (int i = 0; i < count; ++i) {
        const auto [begin, end] = cpu::share(n, i, count);
        CHECK(begin == next);
        CHECK(end >= begin);
        CHECK(end - begin <= n / count + 1);
        next = end;
      }
      CHECK(next == n);
    }
  }
}

TEST_CASE("claims hand out every item once") {
  for (const int count : {1, 2, 3, 5, 70}) {  // 70: more threads than Claims has parts
    Team team(count);
    for (const std::int64_t n : {0, 1, 7, 64, 1000}) {
      for (const std::int64_t grain : {1, 3, 16, 5000}) {
        CAPTURE(count);
        CAPTURE(n);
        CAPTURE(grain);
        std::vector<int> done(static_cast<std::size_t>(n));
        std::atomic<int> wrong{0};
        cpu::Claims claims(n, grain, count);
        team.run([&](int thread) {
          for (std::int64_t begin, end; claims.take(thread, begin, end);) {
            wrong += begin < 0 || begin >= end || end > n;
            for (std::int64_t i = begin; i < end; ++i) ++done[static_cast<std::size_t>(i)];
          }
          std::int64_t begin, end;
          wrong += claims.take(thread, begin, end);
        });
        CHECK(wrong == 0);
        CHECK(std::all_of(done.begin(), done.end(), [](int times) { return times == 1; }));
      }
    }
  }
}

TEST_CASE("a thread takes its own share by halves, then helps whoever has most left, by grains") {
  cpu::Claims claims(100, 5, 4);  // shares of 25
  const auto take = [&](int thread, std::int64_t expected_begin, std::int64_t expected_end) {
    std::int64_t begin = 0, end = 0;
    REQUIRE(claims.take(thread, begin, end));
    CHECK(begin == expected_begin);
    CHECK(end == expected_end);
  };
  take(1, 25, 37);
  take(1, 37, 43);
  take(1, 43, 48);
  take(1, 48, 50);
  take(0, 0, 12);
  take(2, 50, 62);
  take(1, 75, 80);  // its own is done; 13, 13 and 25 are left
}

TEST_CASE("thousands of runs with barriers and claims") {
  Team team(4);
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < 4000; ++i) {
    cpu::Claims first(16, 1, 4), second(16, 4, 4);
    std::array<std::int64_t, 16> squares{};
    std::atomic<std::int64_t> sum{0};
    team.run([&](int thread) {
      for (std::int64_t begin, end; first.take(thread, begin, end);) {
        for (auto k = begin; k < end; ++k) squares[static_cast<std::size_t>(k)] = i + k * k;
      }
      team.barrier();
      for (std::int64_t begin, end; second.take(thread, begin, end);) {
        for (auto k = begin; k < end; ++k) sum += squares[static_cast<std::size_t>(15 - k)];
      }
    });
    total += sum - 16 * i;
  }
  CHECK(total == 4000 * 1240);  // 1240 = 0 + 1 + 4 + ... + 225
}

TEST_CASE("many more threads than cores") {
  const int n = 3 * static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  Team team(n);
  std::vector<int> passed(static_cast<std::size_t>(n));
  bool together = true;
  for (int i = 1; i <= 200; ++i) {
    team.run([&](int thread) {
      ++passed[static_cast<std::size_t>(thread)];
      team.barrier();
      if (thread == i % n) {
        together = std::all_of(passed.begin(), passed.end(), [&](int p) { return p == i; }) && together;
      }
    });
  }
  CHECK(together);
}

TEST_CASE("an idle team takes no time") {
  Team team(4);
  team.run([](int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(5));  // to fall asleep
  const std::clock_t before = std::clock();                   // of all threads of the process
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  CHECK(std::clock() - before < CLOCKS_PER_SEC / 50);
}

TEST_CASE("threads that run without a pause leave each other turns, and so does one that stops in its turn") {
  Team team(2);
  std::array<int, 3> runs{};  // guarded by run() alone
  const auto user = [&](std::size_t me) {
    for (bool done = false; !done;) {  // nobody ends before all have had what they need
      team.run([&](int thread) {
        if (thread == 1) return;
        ++runs[me];
        done = *std::min_element(runs.begin(), runs.end()) >= 100;
      });
      if (me == 0 && runs[0] == 50) std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
  };
  std::vector<std::thread> users;
  for (std::size_t u = 0; u < runs.size(); ++u) users.emplace_back(user, u);
  for (std::thread& t : users) t.join();
  CHECK(*std::min_element(runs.begin(), runs.end()) >= 100);
}

TEST_CASE("models of one process share a team of each size, as long as one uses it") {
  std::shared_ptr<Team> two = Team::shared(2);
  const std::weak_ptr<Team> watched = two;
  CHECK(Team::shared(2) == two);
  CHECK(Team::shared(3)->size() == 3);
  CHECK(two->size() == 2);
  two.reset();
  CHECK(watched.expired());
  CHECK(Team::shared(2)->size() == 2);

  std::vector<std::thread> users;  // come and go at the same time
  std::atomic<int> runs{0};
  for (int u = 0; u < 4; ++u) {
    users.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const std::shared_ptr<Team> team = Team::shared(1 + i % 3);
        team->run([&](int thread) { runs += thread == 0; });
      }
    });
  }
  for (std::thread& t : users) t.join();
  CHECK(runs == 200);
}

TEST_CASE("a child of fork gets a team of its own, whatever its parent was doing") {
  const std::shared_ptr<Team> team = Team::shared(2);
  std::atomic<bool> stop{false};
  std::thread user([&] {  // holds the locks, sometimes at the moment of the fork
    while (!stop) Team::shared(2)->run([](int) {});
  });
  for (int i = 0; i < 5; ++i) {
    const ::pid_t child = ::fork();
    if (child == 0) {
      ::alarm(5);
      const std::shared_ptr<Team> own = Team::shared(2);
      int sum = 0;
      own->run([&](int thread) {
        if (thread == 1) sum = 7;
      });
      ::_exit(own == team || sum != 7);
    }
    int status = -1;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  stop = true;
  user.join();
}

TEST_CASE("the default number of threads is within the affinity mask") {
  const std::vector<int> allowed = host::allowed_cpus();
  std::string list;  // the same as the kernel prints it
  for (std::size_t i = 0; i < allowed.size(); ++i) {
    const std::size_t first = i;
    while (i + 1 < allowed.size() && allowed[i + 1] == allowed[i] + 1) ++i;
    list += (list.empty() ? "" : ",") + std::to_string(allowed[first]);
    if (i > first) list += "-" + std::to_string(allowed[i]);
  }
  std::ifstream status("/proc/thread-self/status");
  std::string line;
  while (std::getline(status, line) && line.rfind("Cpus_allowed_list:", 0) != 0) {
  }
  CHECK(line == "Cpus_allowed_list:\t" + list);

  const auto on = [](const std::vector<int>& cpus) {  // from a thread of that mask
    int count = -1;
    std::thread([&] {
      ::cpu_set_t set;
      CPU_ZERO(&set);
      for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &set);
      if (::sched_setaffinity(0, sizeof set, &set) == 0) count = cpu::default_thread_count();
    }).join();
    return count;
  };
  CHECK(cpu::default_thread_count() >= 1);
  CHECK(cpu::default_thread_count() <= static_cast<int>(allowed.size()));
  if (allowed.back() < CPU_SETSIZE) CHECK(on({allowed.back()}) == 1);
}

namespace {

// A folder that stands for "/".
class FakeRoot {
 public:
  FakeRoot()
      : path_(std::filesystem::temp_directory_path() /
              ("ringlm-root-" + std::to_string(::getpid()) + "-" + std::to_string(++made_))) {}
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
  }
  std::string str() const { return path_.string(); }

 private:
  static inline int made_ = 0;
  std::filesystem::path path_;
};

}  // namespace

namespace {

// Processors first..last: each with a core that holds as many of them as `threads_per_core`, neighbours if
// `step` is 1, else that far apart.
void write_cores(const FakeRoot& root, int first, int last, int threads_per_core, int step,
                 const std::string& name = "core_cpus_list") {
  for (int cpu = first; cpu <= last; ++cpu) {
    const int lowest = step == 1 ? cpu - (cpu - first) % threads_per_core : first + (cpu - first) % step;
    std::string list = std::to_string(lowest);
    for (int t = 1; t < threads_per_core; ++t) list += "," + std::to_string(lowest + t * step);
    root.write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + name, list + "\n");
  }
}

void write_each(const FakeRoot& root, int first, int last, const std::string& file, const std::string& text) {
  for (int cpu = first; cpu <= last; ++cpu) {
    root.write("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/" + file, text);
  }
}

std::vector<int> range(int first, int last) {
  std::vector<int> cpus(static_cast<std::size_t>(last - first + 1));
  std::iota(cpus.begin(), cpus.end(), first);
  return cpus;
}

using Cpus = std::vector<int>;

}  // namespace

TEST_CASE("cores: a Xeon's two hardware threads count once, in any affinity mask") {
  const FakeRoot root;
  write_cores(root, 0, 15, 2, 8);  // 0 and 8, 1 and 9, ...
  CHECK(host::compute_cores(range(0, 15), root.str()) == range(0, 7));
  CHECK(host::compute_cores(Cpus{1, 2, 9, 11}, root.str()) == Cpus{1, 2, 11});
  CHECK(host::compute_cores(Cpus{8, 9}, root.str()) == Cpus{8, 9});  // the siblings of neither
  CHECK(host::compute_cores(Cpus{13}, root.str()) == Cpus{13});
  CHECK(host::compute_cores(Cpus{}, root.str()).empty());

  const FakeRoot neighbours;
  write_cores(neighbours, 0, 7, 2, 1, "thread_siblings_list");
  CHECK(host::compute_cores(range(0, 7), neighbours.str()) == Cpus{0, 2, 4, 6});

  const FakeRoot large;  // beyond what a cpu_set_t holds
  write_cores(large, 2000, 2015, 4, 4);
  CHECK(host::compute_cores(range(2000, 2015), large.str()) == range(2000, 2003));
}

TEST_CASE("cores: an Intel hybrid's efficient cores are left out, unless there is nothing else") {
  const FakeRoot root;
  write_cores(root, 0, 15, 2, 1);
  write_cores(root, 16, 23, 1, 1);
  root.write("sys/devices/cpu_core/cpus", "0-15\n");
  root.write("sys/devices/cpu_atom/cpus", "16-23\n");
  write_each(root, 0, 15, "cpufreq/cpuinfo_max_freq", "5400000\n");
  write_each(root, 4, 7, "cpufreq/cpuinfo_max_freq", "5800000\n");  // two favoured ones
  write_each(root, 16, 23, "cpufreq/cpuinfo_max_freq", "5000000\n");
  CHECK(host::compute_cores(range(0, 23), root.str()) == Cpus{0, 2, 4, 6, 8, 10, 12, 14});
  CHECK(host::compute_cores(Cpus{3, 16, 17}, root.str()) == Cpus{3});
  CHECK(host::compute_cores(range(16, 23), root.str()) == range(16, 23));
}

TEST_CASE("cores: ARM boards") {
  SUBCASE("Orin and Raspberry Pi: all alike") {
    for (const int n : {4, 12}) {
      const FakeRoot root;
      write_cores(root, 0, n - 1, 1, 1);
      write_each(root, 0, n - 1, "cpu_capacity", "1024\n");
      write_each(root, 0, n - 1, "cpufreq/cpuinfo_max_freq", "2201600\n");
      CHECK(host::compute_cores(range(0, n - 1), root.str()) == range(0, n - 1));
    }
  }
  SUBCASE("RK3588: four small and four big") {
    const FakeRoot root;
    write_cores(root, 0, 7, 1, 1);
    write_each(root, 0, 3, "cpu_capacity", "414\n");
    write_each(root, 4, 7, "cpu_capacity", "1024\n");
    CHECK(host::compute_cores(range(0, 7), root.str()) == range(4, 7));
    CHECK(host::compute_cores(Cpus{0, 1, 5}, root.str()) == Cpus{5});
    CHECK(host::compute_cores(range(0, 2), root.str()) == range(0, 2));  // only small ones are allowed
    write_each(root, 6, 6, "cpu_capacity", "768\n");                     // exactly 3/4
    CHECK(host::compute_cores(range(0, 7), root.str()) == range(4, 7));
    write_each(root, 6, 6, "cpu_capacity", "767\n");
    CHECK(host::compute_cores(range(0, 7), root.str()) == Cpus{4, 5, 7});
  }
  SUBCASE("the frequency where a kernel has no capacity for one of them") {
    const FakeRoot root;
    write_each(root, 0, 3, "cpufreq/cpuinfo_max_freq", "1800000\n");
    write_each(root, 4, 7, "cpufreq/cpuinfo_max_freq", "2400000\n");
    CHECK(host::compute_cores(range(0, 7), root.str()) == range(4, 7));
    write_each(root, 0, 6, "cpu_capacity", "1024\n");
    CHECK(host::compute_cores(range(0, 7), root.str()) == range(4, 7));
    write_each(root, 0, 0, "cpufreq/cpuinfo_max_freq", "-1\n");
    CHECK(host::compute_cores(range(0, 7), root.str()) == range(0, 7));
  }
}

TEST_CASE("cores: what is absent or garbage tells nothing") {
  const FakeRoot root;
  CHECK(host::compute_cores(range(0, 3), root.str()) == range(0, 3));
  const std::string lists[] = {
      "", "\n", "x", "0-", "-3", "3-0", "0,", "0 1", "0-1x", "1-99999999999", "0x1", ",", "4-2147483647"};
  for (const std::string& list : lists) {
    CAPTURE(list);
    write_each(root, 0, 3, "topology/core_cpus_list", list);
    root.write("sys/devices/cpu_core/cpus", list);
    root.write("sys/devices/cpu_atom/cpus", list);
    write_each(root, 0, 1, "cpu_capacity", list);
    CHECK(host::compute_cores(range(0, 3), root.str()) == range(0, 3));
  }
  write_each(root, 0, 3, "topology/core_cpus_list", "0-2147483647\n");  // odd, but a list
  CHECK(host::compute_cores(range(0, 3), root.str()) == Cpus{0});
  write_each(root, 0, 3, "cpu_capacity", "0\n");
  CHECK(host::compute_cores(range(0, 3), root.str()).size() == 1);
}

TEST_CASE("control groups, version 2: the tightest of the own group and those above") {
  FakeRoot root;
  root.write("proc/self/cgroup", "0::/user.slice/app.scope\n");
  CHECK_FALSE(host::cgroup_memory(root.str()));
  CHECK_FALSE(host::cgroup_cpus(root.str()));

  const std::string slice = "sys/fs/cgroup/user.slice/";
  root.write(slice + "app.scope/memory.max", "max\n");
  root.write(slice + "app.scope/memory.current", "900\n");
  root.write(slice + "app.scope/cpu.max", "max 100000\n");
  CHECK_FALSE(host::cgroup_memory(root.str()));
  CHECK_FALSE(host::cgroup_cpus(root.str()));

  root.write(slice + "memory.max", "10000\n");
  root.write(slice + "memory.current", "9000\n");
  root.write(slice + "cpu.max", "250000 100000\n");
  CHECK(host::cgroup_memory(root.str()) == 1000u);
  CHECK(host::cgroup_cpus(root.str()) == 2.5);
  root.write(slice + "memory.stat", "anon 2000\ninactive_file 3000\nactive_file 4000\n");
  CHECK(host::cgroup_memory(root.str()) == 8000u);  // pages of files can be dropped

  root.write(slice + "app.scope/memory.max", "1000\n");
  root.write(slice + "app.scope/cpu.max", "50000 100000\n");
  CHECK(host::cgroup_memory(root.str()) == 100u);
  CHECK(host::cgroup_cpus(root.str()) == 0.5);
  root.write(slice + "app.scope/memory.current", "2000\n");  // above its limit for the moment
  CHECK(host::cgroup_memory(root.str()) == 0u);
}

TEST_CASE("control groups, version 1, where a container sees its own group as the root") {
  FakeRoot root;
  root.write("proc/self/cgroup",
             "9:name=systemd:/docker/ab\n4:cpu,cpuacct:/docker/ab\n3:memory:/docker/ab\n");
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  CHECK_FALSE(host::cgroup_memory(root.str()));
  CHECK_FALSE(host::cgroup_cpus(root.str()));

  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n");
  root.write("sys/fs/cgroup/memory/memory.stat",
             "inactive_file 1\nactive_file 1\ntotal_inactive_file 600\ntotal_active_file 400\n");
  root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000\n");
  CHECK(host::cgroup_memory(root.str()) == 4000u);
  CHECK(host::cgroup_cpus(root.str()) == 3.0);
}

TEST_CASE("bytes are written as people read them") {
  CHECK(host::format_bytes(0) == "0 bytes");
  CHECK(host::format_bytes(1023) == "1023 bytes");
  CHECK(host::format_bytes(1536) == "1.50 KiB");
  CHECK(host::format_bytes(std::size_t{12} << 20) == "12.0 MiB");
  CHECK(host::format_bytes(std::size_t{300} << 30) == "300 GiB");
  CHECK(host::format_bytes(std::size_t{5000} << 40) == "5000 TiB");
}

TEST_CASE("a region is zero and page-aligned, moves, and is refused when there is no address space") {
  host::Region a(100, "a test");
  CHECK(a.bytes().size() == 100);
  CHECK(reinterpret_cast<std::uintptr_t>(a.bytes().data()) % 4096 == 0);
  for (const std::byte b : a.bytes()) REQUIRE(b == std::byte{0});
  const std::byte* at = a.bytes().data();
  host::Region b = std::move(a);
  CHECK(b.bytes().data() == at);
  host::Region c;
  c = std::move(b);
  CHECK(c.bytes().data() == at);
  CHECK(host::Region(0, "nothing").bytes().empty());
  CHECK_THROWS_AS(host::Region(std::size_t{1} << 60, "a test"), OutOfMemory);
}

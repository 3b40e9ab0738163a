// The thread team, and what it reads about the machine.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "cpu/team.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>
#include <vector>

#include "host/cgroup.h"
#include "host/memory.h"
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

TEST_CASE("the default number of threads is within the affinity mask") {
  CHECK(cpu::default_thread_count() >= 1);
  CHECK(cpu::default_thread_count() <= static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
}

namespace {

// A folder that stands for "/".
class FakeRoot {
 public:
  FakeRoot()
      : path_(std::filesystem::temp_directory_path() / ("ringlm-root-" + std::to_string(::getpid()))) {}
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  void write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
  }
  std::string str() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace

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

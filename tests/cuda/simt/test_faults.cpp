// Every kernel of faulty_kernels.h is found out, with its name, line, block and thread, and its twin is not.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

#include "simt/faulty_kernels.h"
#include "simt/helpers.h"
#include "simt/kernels.h"
#include "simt/simt.h"

using namespace simt;

namespace {

constexpr unsigned kThreads = faulty::kThreads;
constexpr int kAnyThread = -1;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif

using Writer = void (*)(int*);
using Copier = void (*)(const int*, int*);

// One block; y has an int for each thread, and x as many or four times as many: 0, 1, ...
void run(const std::string& name, Writer kernel, Buffer<int>& y) {
  simt::launch(name.c_str(), kernel, 1, kThreads, 0, nullptr, y.data());
}
void run(const std::string& name, Copier kernel, Buffer<int>& y) {
  const bool fours = name.find("copy") != std::string::npos || name.find("early") != std::string::npos;
  Buffer<int> x("x", (fours ? 4 : 1) * kThreads);
  std::iota(x.begin(), x.end(), 0);
  simt::launch(name.c_str(), kernel, 1, kThreads, 0, nullptr, x.data(), y.data());
}

template <class Run>
std::optional<Fault> fault_of(Run function) {
  try {
    function();
  } catch (const Fault& fault) {
    return fault;
  }
  return std::nullopt;
}

std::string place_of(const std::string& name) {
  return "faulty_kernels.h:" + std::to_string(line_ending_in("faulty_kernels.h", "// here: " + name));
}

// In every order, the first kernel throws a Fault that says `what`, and where; the second does not throw.
// Where two lines meet, either may be the later one, which has the fault; the message has both.
template <class Kernel>
void expect_fault(const std::string& name, Kernel wrong, Kernel right, const std::string& what,
                  int thread = kAnyThread, bool two_lines = false) {
  CAPTURE(name);
  in_every_order([&] {
    Buffer<int> y("y", kThreads);
    if (const auto fault = fault_of([&] { run(name, right, y); }))
      FAIL("nothing is wrong here: " << std::string(fault->what()));
    const auto fault = fault_of([&] { run(name, wrong, y); });
    REQUIRE(fault);
    const std::string message = fault->what();
    CAPTURE(message);
    CHECK(message.find(what) != std::string::npos);
    CHECK(fault->kernel == name);
    const std::string place = fault->file + ":" + std::to_string(fault->line);
    CHECK(message.starts_with(place + ": "));
    if (two_lines) {
      CHECK(message.find(place_of(name)) != std::string::npos);
    } else {
      CHECK(place == place_of(name));
    }
    CHECK(fault->block.x == 0);
    CHECK(fault->thread.x < kThreads);
    if (thread != kAnyThread) CHECK(fault->thread.x == static_cast<unsigned>(thread));
    CHECK(message.ends_with(" [kernel " + name + ", block (0, 0, 0), thread (" +
                            std::to_string(fault->thread.x) + ", 0, 0)]"));
  });
}

// The race build says so. The others do not, but in some order the result is wrong.
template <class Kernel>
void expect_race(const std::string& name, Kernel wrong, Kernel right, const std::string& what,
                 int thread = kAnyThread) {
  if (kRaceBuild) {
    expect_fault(name, wrong, right, what, thread, true);
    return;
  }
  CAPTURE(name);
  bool differs = false;
  in_every_order([&] {
    Buffer<int> y("y", kThreads), expected("expected", kThreads);
    run(name, wrong, y);
    run(name, right, expected);
    differs = differs || !std::equal(y.begin(), y.end(), expected.begin());
  });
  CHECK(differs);
}

// AddressSanitizer ends the process, after it has said where, and the executor has said who.
template <class Kernel>
void expect_death(const std::string& name, Kernel wrong, Kernel right) {
  CAPTURE(name);
  Buffer<int> y("y", kThreads);
  run(name, right, y);
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    run(name, wrong, y);
    _exit(0);
  }
  close(ends[1]);
  std::string said;
  char some[4096];
  for (ssize_t n; (n = read(ends[0], some, sizeof some)) > 0;) said.append(some, static_cast<std::size_t>(n));
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CAPTURE(said);
  CHECK(status != 0);
  CHECK(said.find("AddressSanitizer") != std::string::npos);
  CHECK(said.find(place_of(name)) != std::string::npos);
  CHECK(said.find("[kernel " + name + ", block (0, 0, 0), thread (63, 0, 0)]") != std::string::npos);
}

}  // namespace

TEST_CASE("races") {
  expect_race<Writer>("missing_barrier", faulty::missing_barrier<true>, faulty::missing_barrier<false>, "");
  expect_race<Writer>("missing_syncwarp", faulty::missing_syncwarp<true>, faulty::missing_syncwarp<false>,
                      "");
  expect_race<Writer>("write_after_read", faulty::write_after_read<true>, faulty::write_after_read<false>,
                      "race: ");
  expect_race<Writer>("global_race", faulty::global_race<true>, faulty::global_race<false>, "race: ");
  expect_race<Copier>("copy_without_barrier", faulty::copy_without_barrier<true>,
                      faulty::copy_without_barrier<false>, "");
}

TEST_CASE("a race says what met what") {
  if (!kRaceBuild) return;
  // Backward, the upper warp reads what the lower one writes later; the message is of the later access.
  options().order = Order::kForward;
  Buffer<int> y("y", kThreads);
  const auto fault = fault_of([&] { run("write_after_read", faulty::write_after_read<true>, y); });
  REQUIRE(fault);
  const std::string message = fault->what();
  CAPTURE(message);
  CHECK(message.find("race: ") != std::string::npos);
  CHECK(message.find(" of 4 bytes at byte ") != std::string::npos);
  CHECK(message.find(" of shared array s (256 bytes), after the ") != std::string::npos);
  CHECK(message.find(" of this block, with no barrier between") != std::string::npos);
}

TEST_CASE("races between blocks") {
  in_every_order([] {
    Buffer<int> y("y", 2 * kThreads);
    const auto run_two = [&](Writer kernel) {
      return fault_of([&] { simt::launch("blocks_race", kernel, 2, kThreads, 0, nullptr, y.data()); });
    };
    CHECK_FALSE(run_two(faulty::blocks_race<false>));
    const auto fault = run_two(faulty::blocks_race<true>);
    if (!kRaceBuild) return;  // whose result is the same
    REQUIRE(fault);
    const std::string message = fault->what();
    CHECK(message.starts_with(place_of("blocks_race") + ": race: write of 4 bytes at byte "));
    CHECK(message.find("of another block, with no fence, atomic and fence between") != std::string::npos);
  });
}

TEST_CASE("the last block needs both fences") {
  if (!kRaceBuild) return;
  using kernels::Fences;
  for (const auto kernel :
       {kernels::sum_by_last_block<Fences::kNoRelease>, kernels::sum_by_last_block<Fences::kNoAcquire>}) {
    in_every_order([&] {
      Buffer<float> x("x", 3 * 64), partial("partial", 3), sum("sum", 1);
      std::fill(x.begin(), x.end(), 1.0f);
      Buffer<unsigned> arrived("arrived", std::vector<unsigned>{0});
      const auto fault = fault_of([&] {
        LAUNCH(kernel, 3, 64, 0, nullptr, x.data(), 3 * 64, partial.data(), arrived.data(), sum.data());
      });
      REQUIRE(fault);
      CHECK(fault->line == line_ending_in("kernels.h", "total += ld_global(partial + b);"));
      CHECK(fault->block.x < 3);
    });
  }
}

TEST_CASE("shared memory that nobody has written") {
  expect_race<Writer>("uninitialised_shared", faulty::uninitialised_shared<true>,
                      faulty::uninitialised_shared<false>,
                      "uninitialised: read of 4 bytes at byte 160 of shared array s (256 bytes)", 40);
  if (kRaceBuild) return;
  Buffer<int> y("y", kThreads);  // after kernels and blocks that left their own there
  run("missing_barrier", faulty::missing_barrier<false>, y);
  simt::launch("uninitialised_shared", faulty::uninitialised_shared<true>, 2, kThreads, 0, nullptr, y.data());
  CHECK(y[40] == -1);
}

TEST_CASE("cp.async") {
  expect_fault<Copier>("early_read", faulty::early_read<true>, faulty::early_read<false>,
                       "shared array s (1024 bytes), into which cp.async is copying");
  Buffer<int> y("y", kThreads);
  run("copy_never_waited", faulty::copy_never_waited<false>, y);
  const auto fault = fault_of([&] { run("copy_never_waited", faulty::copy_never_waited<true>, y); });
  REQUIRE(fault);
  CHECK(std::string(fault->what()) ==
        "the thread exits with a cp.async that it has not waited for "
        "[kernel copy_never_waited, block (0, 0, 0), thread (0, 0, 0)]");
}

TEST_CASE("divergent barriers") {
  expect_fault<Writer>("exit_before_barrier", faulty::exit_before_barrier<true>,
                       faulty::exit_before_barrier<false>,
                       "divergent barrier: thread 0 waits here, but thread 48 has exited");
  expect_fault<Writer>("two_barriers", faulty::two_barriers<true>, faulty::two_barriers<false>,
                       "divergent barrier: ", kAnyThread, true);
}

TEST_CASE("divergent collectives and wrong masks") {
  expect_fault<Writer>("divergent_shuffle", faulty::divergent_shuffle<true>, faulty::divergent_shuffle<false>,
                       "divergent collective: ", kAnyThread, true);
  expect_fault<Writer>("shuffle_waits_for_barrier", faulty::shuffle_waits_for_barrier<true>,
                       faulty::shuffle_waits_for_barrier<false>,
                       "divergent collective: lane 0 waits with mask ffffffff for lane 16, which is at ");
  expect_fault<Writer>("mask_leaves_caller_out", faulty::mask_leaves_caller_out<true>,
                       faulty::mask_leaves_caller_out<false>, "wrong mask: ");
  expect_fault<Writer>("masks_differ", faulty::masks_differ<true>, faulty::masks_differ<false>,
                       "divergent collective: ");
  expect_fault<Writer>("shuffle_from_absent_lane", faulty::shuffle_from_absent_lane<true>,
                       faulty::shuffle_from_absent_lane<false>,
                       "wrong mask: lane 15 shuffles from lane 16, which takes no part (mask 0000ffff)");
}

TEST_CASE("out of bounds and misaligned") {
  expect_fault<Copier>("read_past_end", faulty::read_past_end<true>, faulty::read_past_end<false>,
                       "out of bounds: global load of 4 bytes at byte 256 of buffer x (256 bytes)", 63);
  expect_fault<Copier>("write_before_begin", faulty::write_before_begin<true>,
                       faulty::write_before_begin<false>,
                       "out of bounds: global store of 4 bytes at byte -4 of buffer y (256 bytes)", 0);
  expect_fault<Copier>("misaligned_vector", faulty::misaligned_vector<true>, faulty::misaligned_vector<false>,
                       "misaligned: global load of 16 bytes at byte ");
  expect_fault<Copier>("global_load_of_shared", faulty::global_load_of_shared<true>,
                       faulty::global_load_of_shared<false>, " of shared array s (256 bytes)");
  expect_fault<Writer>("shared_overrun", faulty::shared_overrun<true>, faulty::shared_overrun<false>,
                       "out of bounds: shared store of 4 bytes at byte 256 of shared array s (256 bytes)",
                       63);
}

TEST_CASE("out of bounds by plain accesses") {
  const Copier read = faulty::plain_read_past_end<true>, right_read = faulty::plain_read_past_end<false>,
               write = faulty::plain_write_past_end<true>, right_write = faulty::plain_write_past_end<false>;
  const Writer shared = faulty::plain_shared_overrun<true>,
               right_shared = faulty::plain_shared_overrun<false>;
  if (kRaceBuild) {
    expect_fault("plain_read_past_end", read, right_read,
                 "out of bounds: plain global read of 4 bytes at byte 256 of buffer x (256 bytes)", 63);
    expect_fault("plain_write_past_end", write, right_write, "at byte 256 of buffer y (256 bytes)", 63);
    expect_fault("plain_shared_overrun", shared, right_shared,
                 "out of bounds: write of 1 bytes at byte 256 of shared array s (256 bytes)", 63);
  } else if (kAddressSanitizer) {
    expect_death("plain_read_past_end", read, right_read);
    expect_death("plain_write_past_end", write, right_write);
    expect_death("plain_shared_overrun", shared, right_shared);
  } else {
    Buffer<int> y("y", kThreads);
    run("plain_write_past_end", right_write, y);
    const auto fault = fault_of([&] { run("plain_write_past_end", write, y); });
    REQUIRE(fault);
    CHECK(std::string(fault->what()) ==
          "a plain store wrote to byte 256 of buffer y (256 bytes) "
          "[kernel plain_write_past_end, after the launch]");
  }
}

TEST_CASE("accesses that bypass ld_global") {
  Buffer<int> y("y", kThreads);
  const auto bypasses = [&](const std::string& name, Copier kernel) {
    reset_report();
    run(name, kernel, y);
    return report();
  };
  CHECK(bypasses("bypass", faulty::bypass<false>).bypasses == 0);
  CHECK(bypasses("bypass_in_call", faulty::bypass_in_call<false>).bypasses == 0);
  const Report plain = bypasses("bypass", faulty::bypass<true>);
  const Report in_call = bypasses("bypass_in_call", faulty::bypass_in_call<true>);
  if (!kRaceBuild) return;
  CHECK(plain.bypasses == kThreads);
  CHECK(plain.bypass_lines == std::vector<std::string>{place_of("bypass")});
  CHECK(in_call.bypasses == kThreads);
  CHECK(in_call.bypass_lines == std::vector<std::string>{place_of("bypass_in_call")});
}

TEST_CASE("launches that no device takes") {
  Buffer<int> y("y", kThreads);
  const Writer kernel = faulty::missing_barrier<false>;
  const auto what = [&](dim3 grid, dim3 block, std::size_t shared_bytes) {
    const auto fault = fault_of([&] { LAUNCH(kernel, grid, block, shared_bytes, nullptr, y.data()); });
    return fault ? std::string(fault->what()) : "nothing";
  };
  CHECK(what(0, 64, 0) == "no such grid or block [kernel kernel, at its launch]");
  CHECK(what(1, 1025, 0) == "no such grid or block [kernel kernel, at its launch]");
  CHECK(what(1, dim3(1, 1, 65), 0) == "no such grid or block [kernel kernel, at its launch]");
  CHECK(what(1, 64, 48 * 1024 + 1) ==
        "49153 bytes of shared memory, the limit is 49152 [kernel kernel, at its launch]");
  CHECK(what(1, 64, 48 * 1024).find("49408 bytes of shared memory with array s, the limit is 49152") !=
        std::string::npos);
  const Options before = options();
  options().shared_limit = std::size_t{1} << 30;
  CHECK(what(1, 64, 256 * 1024) == "nothing");
  CHECK(what(1, 64, 256 * 1024 + 1) ==
        "262145 bytes of shared memory, the limit is 262144 [kernel kernel, at its launch]");
  options() = before;

  CHECK(what(1, 64, 47 * 1024) == "nothing");
}

TEST_CASE("after a fault, the next launch starts afresh") {
  Buffer<int> y("y", kThreads);
  for (int i = 0; i < 3; ++i) {
    CHECK(fault_of([&] { run("divergent_shuffle", faulty::divergent_shuffle<true>, y); }));
    CHECK_FALSE(fault_of([&] { run("missing_barrier", faulty::missing_barrier<false>, y); }));
    CHECK(y[0] == static_cast<int>(kThreads) - 1);
  }
}

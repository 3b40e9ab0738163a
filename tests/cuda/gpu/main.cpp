// The tests of kernels on a GPU: doctest's options, or --measure. Exit code 2 where there is no GPU to run
// on, 3 where a test has ended its use, 4 where a kernel wrote beside a buffer; else that of doctest.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "gpu/gpu.h"

namespace {

// Says which test case runs, and after each whether the device has an error that no test has seen.
class DeviceListener : public doctest::IReporter {
 public:
  explicit DeviceListener(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& test) override { name_ = test.m_name; }
  void test_case_end(const doctest::CurrentTestCaseStats&) override {
    bool lost = false;
    const std::string found = gpu::error(lost);
    if (found.empty()) return;
    std::fflush(stdout);
    std::fprintf(stderr, "%s, in or after the test case \"%s\"\n", found.c_str(), name_.c_str());
    std::exit(3);
  }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}

 private:
  std::string name_;
};

bool asked_for(int argc, char** argv, std::string_view option) {
  for (int i = 1; i < argc; ++i) {
    if (argv[i] == option) return true;
  }
  return false;
}

}  // namespace

REGISTER_LISTENER("device", 1, DeviceListener);

int main(int argc, char** argv) {
  const bool measure = asked_for(argc, argv, "--measure");
  // Every launch waits for its kernel: tests read buffers right behind it. Heard by CUDA when it starts.
  if (!measure) ::setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  doctest::Context context(argc, argv);
  if (asked_for(argc, argv, "-ltc") || asked_for(argc, argv, "--list-test-cases")) return context.run();
  if (const std::string why = gpu::missing(); !why.empty()) {
    std::fprintf(stderr, "no GPU to run on: %s\n", why.c_str());
    return 2;
  }
  if (measure) {
    gpu::measure();
    return 0;
  }
  std::printf("%s\n", gpu::description().c_str());
  return context.run();
}

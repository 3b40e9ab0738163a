// Messages: where a fault happened, and the tables of the counters.
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string_view>

#include "simt/machine.h"

namespace simt {

namespace {

std::string without_folders(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string triple(dim3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

// By addr2line of binutils, from the debug information of the executable.
Line line_of_code(const void* return_address) {
  Dl_info info;
  link_map* map = nullptr;
  if (dladdr1(return_address, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0) return {};
  const auto call = static_cast<const char*>(return_address) - 1 - map->l_addr;
  char executable[4096];
  const ssize_t length = readlink("/proc/self/exe", executable, sizeof executable - 1);
  if (length <= 0) return {};
  executable[length] = '\0';
  char command[4400], found[4096];
  std::snprintf(command, sizeof command, "addr2line -i -e '%s' %p 2>/dev/null", executable,
                static_cast<const void*>(call));
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(popen(command, "r"), pclose);
  if (!pipe) return {};
  Line line;
  while (std::fgets(found, sizeof found, pipe.get()) !=
         nullptr) {  // inlined functions first, then who called them
    const std::string text = found;
    const std::size_t colon = text.rfind(':');
    if (colon == std::string::npos || text[0] == '?') break;
    line = {without_folders(text.substr(0, colon)), std::atoi(text.c_str() + colon + 1)};
    static constexpr std::string_view kOurs[] = {"half.h", "builtins.h", "device.h", "port.h"};
    if (std::find(std::begin(kOurs), std::end(kOurs), line.file) == std::end(kOurs)) break;
  }
  while (std::fgets(found, sizeof found, pipe.get()) != nullptr) {  // nor is addr2line cut short
  }
  return line;
}

}  // namespace

Line resolve(const Place& place) {
  if (place.file != nullptr) return {without_folders(place.file), place.line};
  return place.code != nullptr ? line_of_code(place.code) : Line{};
}

Text name_of(const Place& place) {
  const Line line = resolve(place);
  Text text{"an unknown line"};
  if (!line.file.empty()) std::snprintf(text.chars, sizeof text.chars, "%s:%d", line.file.c_str(), line.line);
  return text;
}

std::string context_of(const Thread& thread) {
  return "[kernel " + machine().launch->kernel + ", block " + triple(block_index) + ", thread " +
         triple(thread.index) + "]";
}

void fail(const Thread& thread, const Place& place, const char* format, ...) {
  char what[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  Machine& m = machine();
  {
    const Line line = resolve(place);
    const std::string at = line.file.empty() ? "" : line.file + ":" + std::to_string(line.line) + ": ";
    m.fault.emplace(at + what + " " + context_of(thread), m.launch->kernel, line.file, line.line, block_index,
                    thread.index);
  }
  // Kernels are not unwound: a callback of -fsanitize=thread may not throw.
  if (Fiber* fiber = Fiber::running()) fiber->leave();
  const Fault fault = *std::exchange(m.fault, {});
  throw fault;
}

// ---- counters

LineCount Report::line(Op op, const std::string& file, int number) const {
  for (const LineCount& l : lines) {
    if (l.op == op && l.file == file && l.line == number) return l;
  }
  return {file, number, op};
}

BufferCount Report::buffer(const std::string& name) const {
  for (const BufferCount& b : buffers) {
    if (b.name == name) return b;
  }
  throw std::out_of_range("no buffer " + name);
}

Report report() {
  Machine& m = machine();
  Report report;
  report.lines = m.counters.lines();
  for (const auto& [base, a] : m.global.all()) report.buffers.push_back(a.count);
  report.blocks = m.n_blocks;
  report.switches = m.n_switches;
  report.collectives = m.n_collectives;
  report.barriers = m.n_barriers;
  m.races.list_bypasses(report);
  return report;
}

void reset_report() {
  Machine& m = machine();
  m.counters.reset();
  for (auto& [base, a] : m.global.all()) {
    a.count = {a.name, a.bytes};
    std::fill(a.touched.begin(), a.touched.end(), 0);
  }
  m.n_blocks = m.n_switches = m.n_collectives = m.n_barriers = 0;
  m.races.reset_bypasses();
}

std::string to_string(const Report& report) {
  static constexpr const char* kNames[] = {"global load", "global store", "atomic", "shared load",
                                           "shared store"};
  std::string text;
  char row[512];
  std::snprintf(row, sizeof row, "%-32s %-12s %10s %12s %22s %10s\n", "line", "", "requests", "bytes",
                "sectors, wavefronts", "least");
  text += row;
  for (const LineCount& l : report.lines) {
    const std::string line = l.file + ":" + std::to_string(l.line);
    std::snprintf(row, sizeof row, "%-32s %-12s %10llu %12llu %22llu %10llu\n", line.c_str(),
                  kNames[static_cast<int>(l.op)], static_cast<unsigned long long>(l.requests),
                  static_cast<unsigned long long>(l.bytes),
                  static_cast<unsigned long long>(l.sectors + l.wavefronts),
                  static_cast<unsigned long long>(l.least_sectors + l.least_wavefronts));
    text += row;
  }
  std::snprintf(row, sizeof row, "%-16s %12s  %38s  %38s\n", "buffer", "bytes",
                "read: bytes, distinct, in sectors", "written: bytes, distinct, in sectors");
  text += row;
  for (const BufferCount& b : report.buffers) {
    const auto n = [](std::uint64_t v) { return static_cast<unsigned long long>(v); };
    std::snprintf(row, sizeof row, "%-16s %12llu  %12llu %12llu %12llu  %12llu %12llu %12llu\n",
                  b.name.c_str(), n(b.size), n(b.bytes_read), n(b.unique_read), n(32 * b.sectors_read),
                  n(b.bytes_written), n(b.unique_written), n(32 * b.sectors_written));
    text += row;
  }
  return text;
}

}  // namespace simt

#if defined(__SANITIZE_ADDRESS__)
// AddressSanitizer calls this first: its report has the line, this has the rest.
extern "C" void __asan_on_error();
extern "C" void __asan_on_error() {
  const simt::Machine& m = simt::machine();
  if (m.current == nullptr) return;
  std::fprintf(stderr, "simt: the next report is of %s\n", simt::context_of(*m.current).c_str());
}
#endif

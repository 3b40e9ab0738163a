#include "simt/counters.h"

#include <algorithm>
#include <bit>

#include "simt/machine.h"

namespace simt {

void Counters::begin_launch(int n_warps) {
  if (warps_.size() < static_cast<std::size_t>(n_warps)) warps_.resize(static_cast<std::size_t>(n_warps));
}

std::uint32_t Counters::line_of(Op op, const Place& place) {
  auto [found, fresh] =
      index_[static_cast<std::size_t>(op)].try_emplace(place, static_cast<std::uint32_t>(counts_.size()));
  if (fresh) {
    const Line line = resolve(place);
    counts_.push_back({line.file, line.line, op});
  }
  return found->second;
}

void Counters::add(int warp, int lane, Op op, const Place& place, const void* address, int bytes) {
  Warp& w = warps_[static_cast<std::size_t>(warp)];
  const std::uint32_t line = line_of(op, place);
  if (line >= w.lines.size()) w.lines.resize(line + 1);
  PerLine& per_line = w.lines[line];
  if (per_line.requests.empty()) w.in_use.push_back(line);
  const std::uint32_t nth = per_line.seen[static_cast<std::size_t>(lane)]++;
  if (nth == per_line.requests.size()) {
    per_line.requests.push_back(static_cast<std::uint32_t>(w.requests.size()));
    w.requests.push_back({line, bytes, 0, {}});
  }
  Request& request = w.requests[per_line.requests[nth]];
  request.lanes |= 1u << lane;
  request.addresses[static_cast<std::size_t>(lane)] = reinterpret_cast<std::uintptr_t>(address);
}

void Counters::flush(int warp) {
  Warp& w = warps_[static_cast<std::size_t>(warp)];
  for (const Request& request : w.requests) {
    LineCount& count = counts_[request.line];
    ++count.requests;
    count.bytes += static_cast<std::uint64_t>(request.bytes * std::popcount(request.lanes));
    if (count.op == Op::kSharedLoad || count.op == Op::kSharedStore) {
      count_shared(count, request);
    } else {
      count_global(count, request);
    }
  }
  w.requests.clear();
  for (const std::uint32_t line : w.in_use) {
    w.lines[line].requests.clear();
    w.lines[line].seen.fill(0);
  }
  w.in_use.clear();
}

// An access is aligned to its size, so it lies in one sector.
void Counters::count_global(LineCount& count, const Request& request) {
  std::array<std::uintptr_t, 32> addresses;
  std::size_t n = 0;
  for (std::size_t lane = 0; lane < 32; ++lane) {
    if (request.lanes >> lane & 1) addresses[n++] = request.addresses[lane];
  }
  std::sort(addresses.begin(), addresses.begin() + static_cast<std::ptrdiff_t>(n));
  std::uint64_t sectors = 0, distinct_bytes = 0;
  for (std::size_t i = 0; i < n;) {
    const std::uintptr_t sector = addresses[i] / 32;
    std::uint32_t bytes = 0;
    for (; i < n && addresses[i] / 32 == sector; ++i) {
      bytes |= ((1u << request.bytes) - 1) << addresses[i] % 32;
    }
    ++sectors;
    distinct_bytes += static_cast<std::uint64_t>(std::popcount(bytes));
    BufferCount& buffer = machine().global.find(reinterpret_cast<const void*>(sector * 32))->count;
    if (count.op != Op::kGlobalStore) ++buffer.sectors_read;
    if (count.op != Op::kGlobalLoad) ++buffer.sectors_written;
  }
  count.sectors += sectors;
  count.least_sectors += (distinct_bytes + 31) / 32;
}

// 32 banks of 4 bytes. Lanes go in turns of 128 bytes: 32 of up to 4 bytes, 16 of 8, 8 of 16. In a turn, each
// distinct word of a bank takes a wavefront of its own.
void Counters::count_shared(LineCount& count, const Request& request) {
  const std::size_t lanes_a_turn = request.bytes <= 4 ? 32 : 128 / static_cast<std::size_t>(request.bytes);
  const std::uintptr_t words_a_lane = request.bytes <= 4 ? 1 : static_cast<std::uintptr_t>(request.bytes) / 4;
  for (std::size_t first = 0; first < 32; first += lanes_a_turn) {
    std::array<std::uintptr_t, 32> words;
    std::size_t n = 0;
    for (std::size_t lane = first; lane < first + lanes_a_turn; ++lane) {
      if ((request.lanes >> lane & 1) == 0) continue;
      for (std::uintptr_t i = 0; i < words_a_lane; ++i) words[n++] = request.addresses[lane] / 4 + i;
    }
    if (n == 0) continue;
    const auto end = words.begin() + static_cast<std::ptrdiff_t>(n);
    std::sort(words.begin(), end);
    std::array<std::uint64_t, 32> in_bank{};
    std::for_each(words.begin(), std::unique(words.begin(), end), [&](auto word) { ++in_bank[word % 32]; });
    count.wavefronts += *std::max_element(in_bank.begin(), in_bank.end());
    ++count.least_wavefronts;
  }
}

void Counters::drop() {
  for (Warp& w : warps_) {
    w.requests.clear();
    w.in_use.clear();
    w.lines.clear();
  }
}

void Counters::reset() {
  drop();
  counts_.clear();
  for (auto& by_place : index_) by_place.clear();
}

std::vector<LineCount> Counters::lines() const {
  std::vector<LineCount> lines = counts_;
  std::sort(lines.begin(), lines.end(), [](const LineCount& a, const LineCount& b) {
    return std::tie(a.file, a.line, a.op) < std::tie(b.file, b.line, b.op);
  });
  return lines;
}

}  // namespace simt

// Counters against numbers worked out by hand.
#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>

#include "simt/helpers.h"
#include "simt/kernels.h"
#include "simt/simt.h"

using namespace simt;

namespace {

// What the one line with such accesses counted, which has to be that line of kernels.h.
LineCount line_of(Op op, const char* ending) {
  const Report r = report();
  int found = 0;
  for (const LineCount& l : r.lines) found += l.op == op ? 1 : 0;
  CHECK(found == 1);
  return r.line(op, "kernels.h", line_ending_in("kernels.h", ending));
}

template <class T>
LineCount gather(int first, int stride) {
  reset_report();
  Buffer<T> x("x", static_cast<std::size_t>(first + 31 * stride + 1)), y("y", 32);
  LAUNCH(kernels::gather<T>, 1, 32, 0, nullptr, x.data(), first, stride, y.data());
  const LineCount load = line_of(Op::kGlobalLoad, "ld_global_stream(x + first + stride * lane));");
  CHECK(load.requests == 1);
  CHECK(load.bytes == 32 * sizeof(T));
  const BufferCount counted = report().buffer("x");
  CHECK(counted.size == x.size() * sizeof(T));
  CHECK(counted.bytes_read == 32 * sizeof(T));
  CHECK(counted.unique_read == (stride == 0 ? 1 : 32) * sizeof(T));
  CHECK(counted.sectors_read == load.sectors);
  CHECK(counted.bytes_written == 0);
  const BufferCount written = report().buffer("y");
  CHECK(written.unique_written == 32 * sizeof(T));
  CHECK(written.sectors_written == sizeof(T));
  CHECK(written.sectors_read == 0);
  return load;
}

template <class T>
void shared(int stride, std::uint64_t wavefronts, std::uint64_t least) {
  CAPTURE(sizeof(T));
  CAPTURE(stride);
  reset_report();
  Buffer<T> y("y", 32);
  LAUNCH(kernels::shared_stride<T>, 1, 32, 0, nullptr, stride, y.data());
  // With stride 0 all lanes store to one word, which is a race and is not tried.
  const LineCount store = line_of(Op::kSharedStore, "st_shared(&words[stride * lane], T{});");
  const LineCount load = line_of(Op::kSharedLoad, "st_global(y + lane, ld_shared(&words[stride * lane]));");
  for (const LineCount& l : {store, load}) {
    CHECK(l.requests == 1);
    CHECK(l.bytes == 32 * sizeof(T));
    CHECK(l.wavefronts == wavefronts);
    CHECK(l.least_wavefronts == least);
    CHECK(l.sectors == 0);
  }
}

}  // namespace

TEST_CASE("sectors of a request") {
  struct Row {
    LineCount found;
    std::uint64_t sectors, least;
  };
  for (const Row& row : {
           Row{gather<float>(0, 1), 4, 4},   // 128 bytes in a row
           Row{gather<float>(1, 1), 5, 4},   // from byte 4 on: a part of a fifth
           Row{gather<float>(0, 2), 8, 4},   // every second word of 256 bytes
           Row{gather<float>(0, 8), 32, 4},  // a sector for each lane
           Row{gather<float>(3, 0), 1, 1},   // broadcast
           Row{gather<std::int8_t>(0, 1), 1, 1},
           Row{gather<std::int8_t>(20, 1), 2, 1},
           Row{gather<half>(0, 1), 2, 2},
           Row{gather<half>(1, 1), 3, 2},
           Row{gather<float4>(0, 1), 16, 16},  // 512 bytes
           Row{gather<float4>(1, 1), 17, 16},  // rows of 16 bytes, half a sector off
           Row{gather<float4>(0, 2), 32, 16},  // every second
       }) {
    CHECK(row.found.sectors == row.sectors);
    CHECK(row.found.least_sectors == row.least);
  }
}

TEST_CASE("bank conflicts") {
  shared<float>(1, 1, 1);
  shared<float>(2, 2, 1);  // 16 banks, two lanes each
  shared<float>(3, 1, 1);  // odd strides meet every bank once
  shared<float>(4, 4, 1);
  shared<float>(32, 32, 1);      // one bank
  shared<std::int8_t>(1, 1, 1);  // lanes of a word share it
  shared<std::int16_t>(1, 1, 1);
  shared<std::int16_t>(64, 32, 1);
  shared<float2>(1, 2, 2);  // two turns of 16 lanes
  shared<float2>(2, 4, 2);
  shared<float2>(16, 32, 2);
  shared<float4>(1, 4, 4);  // four turns of 8 lanes
  shared<float4>(2, 8, 4);  // lanes l and l + 4 of a turn are 128 bytes apart
}

TEST_CASE("loops, ragged ends and several warps") {
  reset_report();
  Buffer<float> x("x", 1000), sums("sums", 3);
  std::fill(x.begin(), x.end(), 1.0f);
  LAUNCH(kernels::block_sum, 3, 96, 0, nullptr, x.data(), 1000, sums.data());
  const LineCount load = line_of(Op::kGlobalLoad, "sum += ld_global(x + i);");
  // 9 warps go 3 times through 288 floats; the last 136 are 4 full requests and one of 8 lanes.
  CHECK(load.requests == 9 * 3 + 5);
  CHECK(load.bytes == 4000);
  CHECK(load.sectors == 125);
  CHECK(load.least_sectors == 125);
  const LineCount partial = report().line(Op::kSharedLoad, "kernels.h",
                                          line_ending_in("kernels.h", "ld_shared(&of_warp[lane]) : 0.0f;"));
  CHECK(partial.requests == 3);
  CHECK(partial.bytes == 3 * 3 * 4);
  CHECK(report().buffer("x").unique_read == 4000);
  CHECK(report().buffer("sums").bytes_written == 12);
  CHECK(report().blocks == 3);
  CHECK(report().barriers == 3);
  CHECK(report().collectives == 9 * 5 + 3 * 5);
}

TEST_CASE("cp.async is a global load and a shared store") {
  reset_report();
  constexpr int kRows = 9;
  Buffer<float> x("x", kRows * 256), sums("sums", 256);
  std::fill(x.begin(), x.end(), 1.0f);
  LAUNCH(kernels::column_sums, 1, 64, 2 * 256 * sizeof(float), nullptr, x.data(), kRows, sums.data());
  const char* const line = "x + row * kColumns + 4 * thread);";
  const LineCount load = line_of(Op::kGlobalLoad, line), store = line_of(Op::kSharedStore, line);
  CHECK(load.requests == 2 * kRows);
  CHECK(load.bytes == kRows * 1024);
  CHECK(load.sectors == kRows * 32);
  CHECK(store.requests == 2 * kRows);
  CHECK(store.wavefronts == 2 * kRows * 4);
  CHECK(store.least_wavefronts == 2 * kRows * 4);
  CHECK(report().buffer("x").unique_read == report().buffer("x").size);
}

TEST_CASE("atomics read and write a sector each") {
  reset_report();
  Buffer<float> x("x", 40 * 64), partial("partial", 40), sum("sum", 1);
  Buffer<unsigned> arrived("arrived", std::vector<unsigned>{0});
  std::fill(x.begin(), x.end(), 1.0f);
  LAUNCH(kernels::sum_by_last_block<kernels::Fences::kBoth>, 40, 64, 0, nullptr, x.data(), 40 * 64,
         partial.data(), arrived.data(), sum.data());
  const LineCount count = line_of(Op::kGlobalAtomic, "atomicAdd(arrived, 1u);");
  CHECK(count.requests == 40);
  CHECK(count.sectors == 40);
  const BufferCount counter = report().buffer("arrived");
  CHECK(counter.bytes_read == 4 * 40);
  CHECK(counter.bytes_written == 4 * 40 + 4);  // and the last block's zero
  CHECK(counter.unique_written == 4);
  CHECK(report().buffer("partial").sectors_read == 5 * 1);  // 160 bytes, by one block
}

TEST_CASE("no counting, and starting again") {
  Buffer<float> x("x", 32), y("y", 32);
  reset_report();
  options().count = false;
  LAUNCH(kernels::gather<float>, 1, 32, 0, nullptr, x.data(), 0, 1, y.data());
  options().count = true;
  CHECK(report().lines.empty());
  CHECK(report().buffer("x").bytes_read == 0);
  LAUNCH(kernels::gather<float>, 1, 32, 0, nullptr, x.data(), 0, 1, y.data());
  LAUNCH(kernels::gather<float>, 1, 32, 0, nullptr, x.data(), 0, 1, y.data());
  CHECK(report().buffer("x").bytes_read == 256);
  CHECK(report().buffer("x").unique_read == 128);
  CHECK(to_string(report()).find("kernels.h") != std::string::npos);
  reset_report();
  CHECK(report().lines.empty());
  CHECK(report().buffer("x").unique_read == 0);
  CHECK_THROWS_AS(report().buffer("no such"), std::out_of_range);
}

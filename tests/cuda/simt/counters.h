// Requests of a warp, gathered from what its lanes do, and their sectors and wavefronts.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "simt/place.h"
#include "simt/simt.h"

namespace simt {

class Counters {
 public:
  void begin_launch(int n_warps);
  // An access by a lane. It is the same request as those of other lanes that are as many accesses of this
  // line behind the last flush.
  void add(int warp, int lane, Op op, const Place& place, const void* address, int bytes);
  // All lanes of the warp have met: what they do from now on is of later requests.
  void flush(int warp);
  void drop();  // what was not flushed
  void reset();
  std::vector<LineCount> lines() const;

 private:
  struct Request {
    std::uint32_t line;  // in counts_
    int bytes;
    std::uint32_t lanes;
    std::array<std::uintptr_t, 32> addresses;  // by lane
  };
  struct PerLine {
    std::vector<std::uint32_t> requests;   // in Warp::requests, in order
    std::array<std::uint32_t, 32> seen{};  // accesses of each lane
  };
  struct Warp {
    std::vector<Request> requests;
    std::vector<PerLine> lines;         // by the index in counts_
    std::vector<std::uint32_t> in_use;  // those lines that have requests
  };
  std::uint32_t line_of(Op op, const Place& place);
  static void count_global(LineCount& count, const Request& request);
  static void count_shared(LineCount& count, const Request& request);

  std::vector<LineCount> counts_;
  std::array<std::unordered_map<Place, std::uint32_t, PlaceHash>, 5> index_;  // by op: in counts_
  std::vector<Warp> warps_;
};

}  // namespace simt

// What a session asks of a backend that computes in memory of its own, a GPU. On the host side of it stay the
// ids, the rows of a step, their angles and the logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace ringlm {

// The largest logits of a row: the largest first, of equals the lower id. Behind the last, ids are -1.
constexpr int kTopLogits = 64;
struct TopLogits {
  std::int32_t ids[kTopLogits];
  float logits[kTopLogits];
};

// Logits that stay on the device while the host draws from the largest.
struct KeptLogits {
  int row;  // DeviceRegion::logits
  TopLogits largest;
};

// The memory of one session, zeroed.
class DeviceRegion {
 public:
  virtual ~DeviceRegion() = default;
  virtual std::span<std::byte> bytes() const = 0;  // on the device: the host must not look at it
  virtual std::span<std::byte> host() const = 0;   // on the host, where the device reaches it best
  // [n_vocab] on the device: where a step has left the logits of a row that keeps them. There are two, 0 and
  // 1, so that those of the last step are there until the next one has come to its end; a step whose rows do
  // not keep theirs writes over both.
  virtual std::span<const float> logits(int row) const = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  // Bytes on the device that are free.
  virtual std::size_t available() const = 0;

  // Bytes that a region takes on the host besides those asked for.
  virtual std::size_t staging_bytes(std::int64_t M) const = 0;

  // For steps of up to M rows. Throws OutOfMemory.
  virtual std::unique_ptr<DeviceRegion> allocate(std::size_t bytes, std::size_t host_bytes,
                                                 std::int64_t M) = 0;

  // To or from the device, or within it; returns when it is done. Sizes are equal.
  virtual void copy(std::span<std::byte> to, std::span<const std::byte> from) const = 0;
};

}  // namespace ringlm

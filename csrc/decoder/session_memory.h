// The memory of a session: one region, carved once. On a device two: what the operations work with lies
// there, the rest on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "host/memory.h"
#include "kv/cache.h"
#include "ops/ops.h"
#include "ringlm/model.h"
#include "ringlm/session.h"

namespace ringlm {

struct SessionMemory {
  // Bytes that opening takes besides the region: the Session and its Impl.
  static std::size_t object_bytes();

  SessionMemory() = default;
  // `o` has its defaults filled in. Throws OutOfMemory, before anything is taken, when it cannot fit.
  SessionMemory(const Model& model, const SessionOptions& o);

  std::size_t nbytes() const;  // of everything

  host::Region region;                   // or, on a device,
  std::unique_ptr<DeviceRegion> device;  // this
  std::size_t staging_bytes = 0;         // Device::staging_bytes
  kv::Cache cache;
  Activations a;
  std::span<float> tiles;             // [Ops::tile_floats]
  std::span<float> logits[2];         // [n_vocab] of the last step, and of the one that runs
  std::span<KeptLogits> kept;         // [2] of the same, on a device
  std::span<std::int32_t> ids;        // [slots of the text's ring]
  std::span<std::int64_t> held_from;  // [n_layer + 1]: the lowest moving position whose row is still there;
                                      // the last entry is for ids
  std::span<Row> rows;                // [chunk] of the step that runs
  std::span<std::uint8_t> bad;        // [chunk]
};

// Fills in defaults. Throws InvalidArgument for an option out of range.
SessionOptions resolve(const Model& model, const SessionOptions& options);

kv::Layout kv_layout(const Config& c, const SessionOptions& o);

}  // namespace ringlm

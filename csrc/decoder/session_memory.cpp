#include "decoder/session_memory.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <utility>

#include "decoder/model_parts.h"
#include "decoder/session_impl.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Carves arrays out of one region, in declaration order, 64-byte aligned.
class Carver {
 public:
  explicit Carver(std::span<std::byte> bytes) : bytes_(bytes) {}
  template <class T>
  std::span<T> take(std::size_t n) {
    const std::size_t at = std::exchange(used_, used_ + (n * sizeof(T) + 63) / 64 * 64);
    if (bytes_.empty()) return {};  // only measuring
    return {reinterpret_cast<T*>(bytes_.data() + at), n};
  }
  std::size_t used() const { return used_; }

 private:
  std::span<std::byte> bytes_;
  std::size_t used_ = 0;
};

// Fills `m` from `bytes`, or only measures where that is empty. On a device, `bytes` lie there and
// `host_bytes` on the host; else everything is in `bytes`.
SessionPlan carve(SessionMemory& m, std::span<std::byte> bytes, std::span<std::byte> host_bytes,
                  const Config& c, Ops& ops, const SessionOptions& o) {
  Carver carver(bytes), on_host(host_bytes);
  const Device* device = ops.device();
  Carver& host = device ? on_host : carver;
  SessionPlan plan;
  std::size_t before = 0;
  const auto used = [&] { return carver.used() + on_host.used(); };
  const auto since = [&] { return used() - std::exchange(before, used()); };
  const std::size_t M = size(o.chunk);
  const kv::Layout layout = kv_layout(c, o);

  const std::span<std::byte> rows = carver.take<std::byte>(layout.nbytes());
  plan.kv_bytes = layout.nbytes();
  before = plan.kv_bytes;

  Activations& a = m.a;
  a.x = carver.take<float>(M * size(c.n_embd));
  a.normed = carver.take<float>(M * size(c.n_embd));
  a.q = carver.take<float>(M * size(c.q_dim()));
  a.q_pinned = carver.take<float>(M * size(c.q_dim()));
  a.k = carver.take<float>(M * size(c.kv_dim()));
  a.v = carver.take<float>(M * size(c.kv_dim()));
  a.att = carver.take<float>(M * size(c.q_dim()));
  const std::size_t n_ff = size(std::max(c.n_ff, c.n_ff_slots()));
  a.gate = carver.take<float>(M * n_ff);
  a.up = carver.take<float>(M * n_ff);
  a.expert_x = carver.take<float>(M * size(c.n_slots()) * size(c.n_embd));
  a.routing.scores = carver.take<float>(M * size(c.n_expert));
  a.routing.experts = carver.take<std::int32_t>(M * size(c.n_expert_used));
  a.routing.weights = carver.take<float>(M * size(c.n_slots()));
  a.routing.slots = carver.take<std::int32_t>(M * size(c.n_slots()));
  a.routing.first = carver.take<std::int32_t>(c.n_expert > 0 ? size(c.n_expert) + 1 : 0);
  for (std::size_t rope = 0; rope < c.ropes.size(); ++rope) {
    a.angles[rope].own = host.take<float>(M * size(c.rope_dims));
    a.angles[rope].pinned = host.take<float>(M * size(c.rope_dims));
    a.angles[rope].epochs = host.take<float>(M * kEpochs * size(c.rope_dims));
  }
  a.offsets = carver.take<float>(M * size(c.n_head) * kEpochs);
  a.quantized = carver.take<std::byte>(ops.quantized_bytes(c, o.chunk));
  plan.activation_bytes = since();

  std::int64_t tiles = 0;
  for (std::int32_t layer = 0; layer < c.n_layer; ++layer)
    tiles = std::max(tiles, kv::Tiles::most(layout.ring(layer)));
  m.tiles = carver.take<float>(ops.tile_floats(c, tiles));
  plan.scratch_bytes = since();

  plan.device_bytes = device ? carver.used() : 0;

  const auto layers = host.take<kv::Cache::Layer>(size(c.n_layer));
  for (std::span<float>& logits : m.logits) logits = host.take<float>(size(c.n_vocab));
  m.kept = host.take<KeptLogits>(device ? 2 : 0);
  m.ids = host.take<std::int32_t>(size(kv::make_ring(0, o.n_ctx, o.pinned, o.chunk).capacity));
  m.held_from = host.take<std::int64_t>(size(c.n_layer) + 1);
  m.rows = host.take<Row>(M);
  m.bad = host.take<std::uint8_t>(M);
  a.heads = host.take<float*>(M);
  const std::size_t page = size(::sysconf(_SC_PAGESIZE));
  host.take<std::byte>((page - host.used() % page) % page);
  m.staging_bytes = device ? device->staging_bytes(o.chunk) : 0;
  const std::size_t besides = m.staging_bytes + SessionMemory::object_bytes();
  plan.state_bytes = since() + besides;
  plan.nbytes = used() + besides;
  if (!bytes.empty()) m.cache = kv::Cache(layout, rows, layers);
  return plan;
}

// Where they are short: on the device, or on the host.
std::size_t session_bytes(const Model& model, const SessionOptions& o) {
  SessionMemory unused;
  const SessionPlan plan = carve(unused, {}, {}, model.config(), *model.parts().ops, o);
  return plan.device_bytes > 0 ? plan.device_bytes : plan.nbytes;
}

}  // namespace

kv::Layout kv_layout(const Config& c, const SessionOptions& o) {
  return {c.n_layer, c.n_head_kv, c.head_dim, o.k_format, o.v_format, o.n_ctx, o.pinned, o.chunk, c.windows};
}

SessionOptions resolve(const Model& model, const SessionOptions& options) {
  const Config& c = model.config();
  SessionOptions o = options;
  const std::int64_t trained = c.n_ctx_limit;
  if (o.n_ctx == 0) o.n_ctx = std::min<std::int64_t>(4096, trained);
  if (o.n_ctx < 0 || o.n_ctx > trained) {
    throw InvalidArgument(
        "n_ctx is " + std::to_string(o.n_ctx) + "; expected 1 to " + std::to_string(trained) +
        ", the length that the model was trained for" +
        (c.n_ctx_limit > c.n_ctx_train ? " times its RoPE scaling" : "") +
        ", or leave it out for the default" +
        (o.n_ctx > trained ? ". Longer texts can slide through it: overflow=\"slide\"" : ""));
  }
  const std::int32_t most =
      model.parts().ops->device() ? 16384 : 65536;  // rows are a grid's second dimension
  if (o.chunk < 1 || o.chunk > most) {
    throw InvalidArgument("chunk is " + std::to_string(o.chunk) + "; expected 1 to " + std::to_string(most));
  }
  o.chunk = static_cast<std::int32_t>(std::min<std::int64_t>(o.chunk, o.n_ctx));
  for (const KvFormat format : {o.k_format, o.v_format}) {
    if (model.parts().ops->stores(format)) continue;
    throw InvalidArgument(
        "keys and values in float32 are not stored on a GPU: use kv=\"f16\" or kv=\"int8\"");
  }
  if (o.pinned < 0 || o.pinned >= o.n_ctx) {
    throw InvalidArgument("pinned is " + std::to_string(o.pinned) + "; expected 0 to " +
                          std::to_string(o.n_ctx - 1) + ", fewer than n_ctx = " + std::to_string(o.n_ctx));
  }
  const bool can_pin =
      std::any_of(c.windows.begin(), c.windows.end(), [&](std::int32_t w) { return w == 0 || w >= o.n_ctx; });
  if (o.pinned > 0 && o.overflow == Overflow::Slide && !can_pin) {
    throw InvalidArgument("pinned is " + std::to_string(o.pinned) +
                          ", but every layer of this model has an attention window shorter than n_ctx = " +
                          std::to_string(o.n_ctx) +
                          " and forgets what lies before it: open the session with pinned=0");
  }
  if (const Ropes& ropes = model.parts().ropes; o.overflow == Overflow::Slide && ropes.regime(o.n_ctx) > 0) {
    throw InvalidArgument("a text cannot slide through n_ctx = " + std::to_string(o.n_ctx) +
                          ": the model turns its keys in another way when the text is longer than " +
                          std::to_string(static_cast<std::int64_t>(c.ropes[0].original)) +
                          " tokens. Open the session with an n_ctx up to that, or with overflow=\"error\"");
  }
  return o;
}

SessionPlan plan_session(const Model& model, const SessionOptions& options) {
  const SessionOptions o = resolve(model, options);
  SessionMemory unused;
  SessionPlan plan = carve(unused, {}, {}, model.config(), *model.parts().ops, o);
  plan.options = o;
  const kv::Layout layout = kv_layout(model.config(), o);
  for (std::int32_t layer = 0; layer < layout.n_layer; ++layer) {
    const kv::Ring ring = layout.ring(layer);
    const bool plain = ring.visible == o.n_ctx;
    const std::int32_t window = plain ? 0 : static_cast<std::int32_t>(ring.visible);
    auto kind = std::find_if(plan.kinds.begin(), plan.kinds.end(),
                             [&](const LayerKind& k) { return k.window == window; });
    if (kind == plan.kinds.end()) {
      kind = plan.kinds.insert(kind, {window, 0, ring.visible, ring.pinned, ring.capacity, 0});
    }
    kind->n_layer += 1;
    kind->nbytes += layout.nbytes(layer);
  }
  return plan;
}

std::int64_t largest_n_ctx(const Model& model, const SessionOptions& options, std::size_t memory) {
  SessionOptions o = options;
  o.n_ctx = 0;  // checked below
  const std::int64_t trained = model.config().n_ctx_limit;
  const std::int64_t least = o.pinned + 1;
  const auto fits = [&](std::int64_t n_ctx) {
    SessionOptions tried = o;
    tried.n_ctx = n_ctx;
    tried.chunk = static_cast<std::int32_t>(std::min<std::int64_t>(o.chunk, n_ctx));
    return session_bytes(model, tried) <= memory;
  };
  if (least > trained || !fits(least)) return 0;
  std::int64_t low = least, high = trained + 1;  // low fits, high does not or is not allowed
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

SessionMemory::SessionMemory(const Model& model, const SessionOptions& o) {
  const Config& c = model.config();
  Ops& ops = *model.parts().ops;
  Device* on = ops.device();
  const std::size_t there = on ? on->available() : host::available_memory();
  const SessionPlan plan = carve(*this, {}, {}, c, ops, o);
  const std::size_t needed = on ? plan.device_bytes : plan.nbytes;
  if (needed > there) {
    const std::int64_t most = std::min(largest_n_ctx(model, o, there), o.n_ctx - 1);
    throw OutOfMemory("a session of n_ctx = " + std::to_string(o.n_ctx) + " needs " +
                      host::format_bytes(needed) + (on ? " on the GPU, " : ", ") +
                      host::format_bytes(plan.kv_bytes) + " of it for keys and values, but only " +
                      host::format_bytes(there) + " is available; " +
                      (most > 0 ? "n_ctx = " + std::to_string(most) + " would fit"
                                : "not even n_ctx = " + std::to_string(o.pinned + 1) + " would fit"));
  }
  if (on) {
    const std::size_t host_bytes = plan.nbytes - plan.device_bytes - staging_bytes - object_bytes();
    device = on->allocate(plan.device_bytes, host_bytes, o.chunk);
    a.region = device.get();
    carve(*this, device->bytes(), device->host(), c, ops, o);
    for (int row : {0, 1}) kept[size(row)].row = row;
  } else {
    region = host::Region(plan.nbytes - object_bytes(), "a session");
    carve(*this, region.bytes(), {}, c, ops, o);
  }
}

std::size_t SessionMemory::nbytes() const {
  const std::size_t bytes =
      device ? device->bytes().size() + device->host().size() + staging_bytes : region.bytes().size();
  return bytes + object_bytes();
}

std::size_t SessionMemory::object_bytes() { return sizeof(Session) + sizeof(Session::Impl); }

}  // namespace ringlm

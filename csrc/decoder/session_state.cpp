// Copies of a session: in memory, as bytes, and one head's rows for a look inside.
//
// A saved state is, in the machine's byte order (little-endian on every supported one): the header below, the
// windows [n_layer] int32, what RoPE turns by (frequencies_of) float64, the ids of the pinned and of the
// moving tokens, the logits if there are some, and per layer and KV head the K rows, their scales, the V rows
// and their scales: those that the next query sees, in ascending position.
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "decoder/model_parts.h"
#include "decoder/session_impl.h"
#include "model/rope.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

struct Header {
  char magic[8];
  std::uint32_t version;
  std::int32_t n_vocab, n_layer, n_head_kv, head_dim;
  std::int32_t k_format, v_format, slides, chunk;
  std::int32_t has_logits, regime, rope_dims;
  std::int64_t n_ctx, pinned, position;
};
static_assert(sizeof(Header) == 80 && std::is_trivially_copyable_v<Header>);

constexpr char kMagic[8] = {'r', 'i', 'n', 'g', 'l', 'm', 'K', 'V'};
constexpr std::uint32_t kVersion = 2;

// The first moving position that is saved. What never slides is saved whole, also when it is full and there
// is no next query.
std::int64_t saved_from(const SessionOptions& o, const kv::Ring& ring, std::int64_t p) {
  return o.overflow == Overflow::Error && ring.visible == o.n_ctx ? ring.pinned : ring.oldest(p);
}

// f(first slot, n) for runs of consecutive slots that hold, in ascending position, what is saved at position
// p.
template <class F>
void for_each_saved_run(const SessionOptions& o, const kv::Ring& ring, std::int64_t p, F f) {
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t slot = ring.slot(begin);
      const std::int64_t n =
          std::min(end - begin, begin < ring.pinned ? ring.pinned - slot : ring.capacity - slot);
      f(slot, n);
      begin += n;
    }
  };
  run(0, std::min(ring.pinned, p));
  run(saved_from(o, ring, p), p);
}

// f(span of bytes, whether it is of rows) for everything behind the windows, in order: the same walk for
// saving and loading.
template <class F>
void for_each_piece(const Session::Impl& s, F f) {
  const SessionMemory& m = s.memory;
  const std::int64_t p = s.position;
  for_each_saved_run(s.options, s.text_ring(), p, [&](std::int64_t slot, std::int64_t n) {
    f(std::as_writable_bytes(m.ids.subspan(size(slot), size(n))), false);
  });
  if (s.has_logits) f(std::as_writable_bytes(m.logits[s.current]), false);
  const kv::Layout& l = m.cache.layout();
  for (std::int32_t layer = 0; layer < l.n_layer; ++layer) {
    const kv::Ring& ring = m.cache.ring(layer);
    for (std::int32_t head = 0; head < l.n_head_kv; ++head) {
      for (const kv::Rows& rows : {m.cache.k(layer, head), m.cache.v(layer, head)}) {
        const std::int64_t row = l.head_dim * static_cast<std::int64_t>(element_bytes(rows.format));
        for_each_saved_run(s.options, ring, p, [&](std::int64_t slot, std::int64_t n) {
          f(std::span(reinterpret_cast<std::byte*>(rows.data) + slot * row, size(n * row)), true);
        });
        if (!rows.scales) continue;
        for_each_saved_run(s.options, ring, p, [&](std::int64_t slot, std::int64_t n) {
          f(std::span(reinterpret_cast<std::byte*>(rows.scales) + 2 * slot, size(2 * n)), true);
        });
      }
    }
  }
}

// Bytes of the cache where the host can read them: as they are, or copied from a device.
std::span<const std::byte> on_host(const Session::Impl& s, std::span<const std::byte> bytes,
                                   std::vector<std::byte>& copy) {
  Device* device = s.model->parts().ops->device();
  if (!device) return bytes;
  copy.resize(bytes.size());
  device->copy(copy, bytes);
  return copy;
}

// One KV head's rows, the same.
kv::Rows on_host(const Session::Impl& s, const kv::Ring& ring, kv::Rows rows,
                 std::vector<std::byte> (&copy)[2]) {
  const auto bytes = [&](std::uint8_t* first, std::size_t each, std::vector<std::byte>& to) {
    const std::span all(reinterpret_cast<const std::byte*>(first), size(ring.capacity) * each);
    return reinterpret_cast<std::uint8_t*>(const_cast<std::byte*>(on_host(s, all, to).data()));
  };
  const std::size_t d = size(s.model->config().head_dim);
  rows.data = bytes(rows.data, d * element_bytes(rows.format), copy[0]);
  if (rows.scales) rows.scales = bytes(rows.scales, scale_bytes(rows.format), copy[1]);
  return rows;
}

Header header_of(const Session::Impl& s) {
  const Config& c = s.model->config();
  const SessionOptions& o = s.options;
  Header h{};
  std::memcpy(h.magic, kMagic, sizeof kMagic);
  h.version = kVersion;
  h.n_vocab = c.n_vocab, h.n_layer = c.n_layer, h.n_head_kv = c.n_head_kv, h.head_dim = c.head_dim;
  h.k_format = static_cast<std::int32_t>(o.k_format), h.v_format = static_cast<std::int32_t>(o.v_format);
  h.slides = o.overflow == Overflow::Slide, h.chunk = o.chunk;
  h.has_logits = s.has_logits, h.regime = s.regime, h.rope_dims = c.rope_dims;
  h.n_ctx = o.n_ctx, h.pinned = o.pinned, h.position = s.position;
  return h;
}

[[noreturn]] void refuse(const std::string& what) {
  throw FileFormatError("this is no saved session that fits the model: " + what);
}

// What the rows of a text depend on besides the weights: of each rope in the first regime, and how it grows.
std::vector<double> frequencies_of(const Model& model) {
  std::vector<double> all;
  for (std::size_t rope = 0; rope < model.config().ropes.size(); ++rope) {
    for (const std::int32_t regime : {0, model.parts().ropes.regime(model.config().n_ctx_limit)}) {
      const RopeAngles& angles = model.parts().ropes.at(static_cast<std::int32_t>(rope), regime);
      all.insert(all.end(), angles.frequencies.begin(), angles.frequencies.end());
      all.push_back(angles.magnitude);
    }
  }
  return all;
}

// The options that a header stands for.
SessionOptions options_of(const Header& h, const Config& c, std::int32_t last_regime) {
  if (std::memcmp(h.magic, kMagic, sizeof kMagic) != 0) refuse("it begins with other bytes");
  if (h.version != kVersion) {
    refuse("it has version " + std::to_string(h.version) + "; this ringlm reads " + std::to_string(kVersion));
  }
  const auto same = [](const char* what, std::int64_t found, std::int64_t expected) {
    if (found == expected) return;
    refuse(std::string(what) + " is " + std::to_string(found) + ", the model has " +
           std::to_string(expected));
  };
  same("n_vocab", h.n_vocab, c.n_vocab);
  same("n_layer", h.n_layer, c.n_layer);
  same("n_head_kv", h.n_head_kv, c.n_head_kv);
  same("head_dim", h.head_dim, c.head_dim);
  same("rope_dims", h.rope_dims, c.rope_dims);
  const auto within = [](const char* what, std::int64_t found, std::int64_t least, std::int64_t most) {
    if (found >= least && found <= most) return;
    refuse(std::string(what) + " is " + std::to_string(found));
  };
  within("the K format", h.k_format, 0, static_cast<int>(KvFormat::Int8));
  within("the V format", h.v_format, 0, static_cast<int>(KvFormat::Int8));
  within("the overflow rule", h.slides, 0, 1);
  within("the mark for logits", h.has_logits, 0, 1);
  within("chunk", h.chunk, 1, h.n_ctx);
  within("position", h.position, 0, h.slides ? std::int64_t{1} << 60 : h.n_ctx);
  // One that slides has angles that do not depend on its length.
  const bool one_regime = h.slides || last_regime == 0;
  within("the regime of its RoPE", h.regime, one_regime ? 0 : -1, one_regime ? 0 : last_regime);
  if (h.has_logits && h.position == 0) refuse("it has logits, but no tokens");
  return {.n_ctx = h.n_ctx,
          .chunk = h.chunk,
          .k_format = static_cast<KvFormat>(h.k_format),
          .v_format = static_cast<KvFormat>(h.v_format),
          .pinned = h.pinned,
          .overflow = h.slides ? Overflow::Slide : Overflow::Error};
}

}  // namespace

void Session::save(const Write& write) const {
  const Impl::Use use(*impl_);
  impl_->fetch_logits();
  const Header h = header_of(*impl_);
  write(std::as_bytes(std::span(&h, 1)));
  write(std::as_bytes(std::span(impl_->model->config().windows)));
  const std::vector<double> frequencies = frequencies_of(*impl_->model);
  write(std::as_bytes(std::span(frequencies)));
  std::vector<std::byte> copy;
  for_each_piece(*impl_, [&](std::span<const std::byte> piece, bool of_rows) {
    write(of_rows ? on_host(*impl_, piece, copy) : piece);
  });
}

std::unique_ptr<Session> Session::load(std::shared_ptr<const Model> model, const Read& read,
                                       const std::function<void()>& poll) {
  if (!model) throw InvalidArgument("a session needs a model");
  model->parts().check_process();
  const Config& c = model->config();
  Header h;
  read(std::as_writable_bytes(std::span(&h, 1)));
  SessionOptions o = options_of(h, c, model->parts().ropes.regime(c.n_ctx_limit));
  o.poll = poll;
  std::vector<std::int32_t> windows(size(c.n_layer));
  read(std::as_writable_bytes(std::span(windows)));
  if (windows != c.windows) refuse("its attention windows are others");
  const std::vector<double> ours = frequencies_of(*model);
  std::vector<double> frequencies(ours.size());
  read(std::as_writable_bytes(std::span(frequencies)));
  if (frequencies != ours) refuse("its RoPE turns in another way");
  try {
    o = resolve(*model, o);
  } catch (const InvalidArgument& e) {
    refuse(e.what());
  }

  std::unique_ptr<Session> session = wrap(std::make_unique<Impl>(std::move(model), o));
  Impl& s = *session->impl_;
  s.position = h.position;
  s.has_logits = h.has_logits != 0;
  s.regime = h.regime;
  for (std::int32_t i = 0; i <= c.n_layer; ++i)
    s.memory.held_from[size(i)] = saved_from(o, s.ring(i), h.position);
  Device* device = s.model->parts().ops->device();
  std::vector<std::byte> copy;
  for_each_piece(s, [&](std::span<std::byte> piece, bool of_rows) {
    if (!device || !of_rows) return read(piece);
    copy.resize(piece.size());
    read(copy);
    device->copy(piece, copy);
  });
  for_each_saved_run(s.options, s.text_ring(), h.position, [&](std::int64_t slot, std::int64_t n) {
    for (const std::int32_t id : s.memory.ids.subspan(size(slot), size(n))) {
      if (id < 0 || id >= c.n_vocab) refuse("it has the token id " + std::to_string(id));
    }
  });
  return session;
}

std::unique_ptr<Session> Session::fork() const {
  const Impl& s = *impl_;
  const Impl::Use use(*impl_);
  std::unique_ptr<Session> copy = wrap(std::make_unique<Impl>(s.model, s.options));
  Impl& to = *copy->impl_;
  if (Device* device = s.model->parts().ops->device()) {
    device->copy(to.memory.cache.bytes(), s.memory.cache.bytes());
  } else {
    std::ranges::copy(s.memory.cache.bytes(), to.memory.cache.bytes().begin());
  }
  std::ranges::copy(s.memory.ids, to.memory.ids.begin());
  std::ranges::copy(s.memory.held_from, to.memory.held_from.begin());
  if (s.has_logits) std::ranges::copy(s.logits(), to.memory.logits[to.current].begin());
  to.has_logits = s.has_logits;
  to.regime = s.regime;
  to.position = s.position.load();
  return copy;
}

KvRows Session::kv_rows(std::int32_t layer, std::int32_t head) const {
  const Impl& s = *impl_;
  const Impl::Use use(*impl_);
  const Config& c = s.model->config();
  if (layer < 0 || layer >= c.n_layer || head < 0 || head >= c.n_head_kv) {
    throw InvalidArgument("there is no layer " + std::to_string(layer) + " with a KV head " +
                          std::to_string(head) + "; the model has layers 0 to " +
                          std::to_string(c.n_layer - 1) + " with heads 0 to " +
                          std::to_string(c.n_head_kv - 1));
  }
  if (s.regime < 0) {
    throw StateError("the rows are to be computed again, which was broken off: feed a token first");
  }
  const kv::Cache& cache = s.memory.cache;
  const kv::Ring& ring = cache.ring(layer);
  const std::int64_t p = s.position, length = cache.layout().epoch();
  KvRows rows;
  for (std::int64_t t = 0; t < std::min(ring.pinned, p); ++t) rows.positions.push_back(t);
  for (std::int64_t t = s.oldest_seen(layer); t < p; ++t) rows.positions.push_back(t);

  const std::size_t d = size(c.head_dim);
  rows.k.resize(rows.positions.size() * d);
  rows.v.resize(rows.positions.size() * d);
  std::vector<std::byte> copies[2][2];
  const kv::Rows k = on_host(s, ring, cache.k(layer, head), copies[0]);
  const kv::Rows v = on_host(s, ring, cache.v(layer, head), copies[1]);
  const Model::Parts& parts = s.model->parts();
  const LayerWeights& w = parts.weights.layers[size(layer)];
  std::vector<float> shift(d), table(size(c.rope_dims));
  for (std::size_t i = 0; i < rows.positions.size(); ++i) {
    const std::int64_t t = rows.positions[i];
    float* const key = &rows.k[i * d];
    float* const value = &rows.v[i * d];
    kv::load_row(k, ring.slot(t), key, c.head_dim);
    kv::load_row(v, ring.slot(t), value, c.head_dim);
    if (k.format == KvFormat::Int8) kv::rotate_back(cache.rotation(), key);
    if (v.format == KvFormat::Int8) kv::rotate_back(cache.rotation(), value);
    if (centred(w, cache)) {
      epoch_table(parts.ropes.at(c.rope_of[size(layer)], s.regime), t / length, length, table);
      centre(c, w, head, table, shift);
      for (std::size_t j = 0; j < d; ++j) key[j] += shift[j];
    }
  }
  return rows;
}

}  // namespace ringlm

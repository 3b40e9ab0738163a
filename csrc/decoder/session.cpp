#include "ringlm/session.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "decoder/decoder.h"
#include "decoder/model_parts.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t choose_n_ctx(const Config& c, std::int64_t wanted) {
  const auto trained = static_cast<std::int64_t>(static_cast<double>(c.n_ctx_train) * c.rope_factor);
  if (wanted == 0) return std::min<std::int64_t>(4096, trained);
  if (wanted < 0 || wanted > trained) {
    throw InvalidArgument("n_ctx is " + std::to_string(wanted) + "; expected 1 to " +
                          std::to_string(trained) + ", the length that the model was trained for");
  }
  return wanted;
}

// Carves buffers out of one region, in declaration order, 64-byte aligned.
class Carver {
 public:
  explicit Carver(std::span<std::byte> bytes) : bytes_(bytes) {}
  std::span<float> floats(std::size_t n) {
    const std::size_t at = std::exchange(used_, used_ + (n * sizeof(float) + 63) / 64 * 64);
    if (bytes_.empty()) return {};  // only measuring
    return {reinterpret_cast<float*>(bytes_.data() + at), n};
  }
  std::size_t used() const { return used_; }

 private:
  std::span<std::byte> bytes_;
  std::size_t used_ = 0;
};

struct Buffers {
  Activations a;
  std::span<float> logits;  // [n_vocab]
};

Buffers carve(Carver& carver, const Config& c, const Ops& ops, const SessionOptions& o) {
  const std::size_t M = size(o.chunk);
  Buffers b;
  b.a.x = carver.floats(M * size(c.n_embd));
  b.a.normed = carver.floats(M * size(c.n_embd));
  b.a.q = carver.floats(M * size(c.q_dim()));
  b.a.k = carver.floats(M * size(c.kv_dim()));
  b.a.v = carver.floats(M * size(c.kv_dim()));
  b.a.att = carver.floats(M * size(c.q_dim()));
  b.a.gate = carver.floats(M * size(c.n_ff));
  b.a.up = carver.floats(M * size(c.n_ff));
  b.a.rope = carver.floats(M * size(c.rope_dims));
  b.a.tiles = carver.floats(ops.tile_floats(c, o.n_ctx));
  b.logits = carver.floats(size(c.n_vocab));
  return b;
}

std::size_t buffer_bytes(const Config& c, const Ops& ops, const SessionOptions& o) {
  Carver measure({});
  carve(measure, c, ops, o);
  return measure.used();
}

}  // namespace

struct Session::Impl {
  Impl(std::shared_ptr<const Model> m, const SessionOptions& o)
      : model(std::move(m)), options(o), memory(std::make_unique<Memory>(*model, o)) {
    ids.resize(size(o.n_ctx));
    rows.reserve(size(o.chunk));
  }

  // What close() gives back.
  struct Memory {
    Memory(const Model& m, const SessionOptions& o)
        : cache({m.config().n_layer, m.config().n_head_kv, m.config().head_dim, o.n_ctx, o.k_format,
                 o.v_format}),
          region(buffer_bytes(m.config(), *m.parts().ops, o), "the activations of a session",
                 "a smaller chunk takes less") {
      Carver carver(region.bytes());
      buffers = carve(carver, m.config(), *m.parts().ops, o);
    }
    kv::Cache cache;
    kv::Region region;
    Buffers buffers;
  };

  std::shared_ptr<const Model> model;
  SessionOptions options;  // defaults filled in
  std::unique_ptr<Memory> memory;
  std::vector<std::int32_t> ids;  // [n_ctx]; those before `position` are in the cache
  std::atomic<std::int64_t> position{0};
  std::vector<Row> rows;  // of the step that runs
  bool has_logits = false;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> busy{false};
  std::atomic<bool> closed{false};

  // One user at a time, for the length of a call.
  class Use {
   public:
    explicit Use(Impl& s) : s_(s) {
      s.model->parts().check_process();
      if (s.closed) throw StateError("the session is closed: open a new one with model.session()");
      if (s.busy.exchange(true, std::memory_order_acquire)) {
        throw StateError("the session is busy in another thread: give every thread a session of its own");
      }
    }
    ~Use() { s_.busy.store(false, std::memory_order_release); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Impl& s_;
  };

  void check_tokens(std::span<const std::int32_t> tokens) const {
    if (tokens.empty())
      throw InvalidArgument("there are no tokens to feed: an empty prompt needs at least the BOS token");
    const std::int32_t n_vocab = model->config().n_vocab;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] >= n_vocab) {
        throw InvalidArgument("token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                              "; the vocabulary has ids 0 to " + std::to_string(n_vocab - 1));
      }
    }
    const std::size_t left = size(options.n_ctx - position);
    if (tokens.size() > left) {
      throw ContextOverflow(
          std::to_string(tokens.size()) + " tokens do not fit: " + std::to_string(position) +
          " of n_ctx = " + std::to_string(options.n_ctx) + " are in use, " + std::to_string(left) +
          " are left. Shorten the text, rewind, or open the session with a larger n_ctx");
    }
  }

  // One atomic step: at most `chunk` tokens; logits of the last ones into `out` [n, n_vocab], n may be 0.
  void step(std::span<const std::int32_t> tokens, std::span<float> out) {
    has_logits = false;
    if (cancelled.load(std::memory_order_relaxed)) throw Cancelled("the step was cancelled", 0);
    const std::int64_t first = position;
    rows.clear();
    for (const std::int32_t token : tokens) {
      rows.push_back({token, first + static_cast<std::int64_t>(rows.size()), &memory->cache});
    }
    const Model::Parts& p = model->parts();
    run_step({p.config, p.weights, p.rope_frequencies, *p.ops}, {rows, memory->buffers.a}, out, cancelled);
    std::copy(tokens.begin(), tokens.end(), ids.begin() + first);
    position = first + static_cast<std::int64_t>(tokens.size());
  }

  std::span<const float> logits() const {
    if (!has_logits) throw StateError("there are no logits: feed a token first");
    return memory->buffers.logits;
  }
};

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options) {
  if (!model) throw InvalidArgument("a session needs a model");
  model->parts().check_process();
  if (options.chunk < 1 || options.chunk > 65536) {
    throw InvalidArgument("chunk is " + std::to_string(options.chunk) + "; expected 1 to 65536");
  }
  SessionOptions o = options;
  o.n_ctx = choose_n_ctx(model->config(), options.n_ctx);
  o.chunk = static_cast<std::int32_t>(std::min<std::int64_t>(options.chunk, o.n_ctx));
  impl_ = std::make_unique<Impl>(std::move(model), o);
}

Session::~Session() = default;

void Session::prefill(std::span<const std::int32_t> tokens, std::span<float> all_logits,
                      const Progress& progress) {
  Impl& s = *impl_;
  const Impl::Use use(s);
  s.check_tokens(tokens);
  const std::size_t n_vocab = size(s.model->config().n_vocab);
  if (!all_logits.empty() && all_logits.size() != tokens.size() * n_vocab) {
    throw InvalidArgument("all_logits has " + std::to_string(all_logits.size()) + " elements; expected " +
                          std::to_string(tokens.size()) + " tokens times " + std::to_string(n_vocab));
  }
  std::span<float> last = s.memory->buffers.logits;
  std::size_t done = 0;
  while (done < tokens.size()) {
    const std::size_t n = std::min(size(s.options.chunk), tokens.size() - done);
    const bool final = done + n == tokens.size();
    std::span<float> out = !all_logits.empty() ? all_logits.subspan(done * n_vocab, n * n_vocab)
                           : final             ? last
                                               : std::span<float>{};
    try {
      s.step(tokens.subspan(done, n), out);
    } catch (const Cancelled&) {
      s.cancelled = false;
      throw Cancelled("the prefill was cancelled with " + std::to_string(done) + " of " +
                          std::to_string(tokens.size()) + " tokens in the cache",
                      done);
    }
    done += n;
    if (final) {
      if (!all_logits.empty())
        std::copy(out.end() - static_cast<std::ptrdiff_t>(n_vocab), out.end(), last.begin());
      s.has_logits = true;
    }
    if (progress) progress(done, tokens.size());
  }
}

void Session::decode(std::int32_t token) {
  Impl& s = *impl_;
  const Impl::Use use(s);
  const std::span<const std::int32_t> one(&token, 1);
  s.check_tokens(one);
  try {
    s.step(one, s.memory->buffers.logits);
  } catch (const Cancelled&) {
    s.cancelled = false;
    throw;
  }
  s.has_logits = true;
}

std::span<const float> Session::logits() const {
  const Impl::Use use(*impl_);
  return impl_->logits();
}

std::int32_t Session::sample(Sampler& sampler) const {
  const Impl::Use use(*impl_);
  return sampler.sample(impl_->logits());
}

float Session::log_probability(std::int32_t id) const {
  const Impl::Use use(*impl_);
  return ringlm::log_probability(impl_->logits(), id);
}

std::vector<LogProb> Session::top_log_probabilities(std::int32_t k) const {
  const Impl::Use use(*impl_);
  return ringlm::top_log_probabilities(impl_->logits(), k);
}

void Session::rewind(std::int64_t n) {
  Impl& s = *impl_;
  const Impl::Use use(s);
  if (n < 0 || n > s.position) {
    throw InvalidArgument("cannot rewind by " + std::to_string(n) + " tokens; expected 0 to " +
                          std::to_string(s.position));
  }
  if (n == 0) return;
  s.position -= n;
  s.has_logits = false;
}

void Session::cancel() noexcept { impl_->cancelled.store(true, std::memory_order_relaxed); }

void Session::close() {
  Impl& s = *impl_;
  if (s.closed) return;
  const Impl::Use use(s);
  s.closed = true;
  s.memory.reset();
}

bool Session::closed() const noexcept { return impl_->closed; }
std::int64_t Session::position() const noexcept { return impl_->position; }
std::span<const std::int32_t> Session::tokens() const noexcept {
  return {impl_->ids.data(), size(impl_->position)};
}
std::int64_t Session::n_ctx() const noexcept { return impl_->options.n_ctx; }
std::int32_t Session::chunk() const noexcept { return impl_->options.chunk; }
KvFormat Session::k_format() const noexcept { return impl_->options.k_format; }
KvFormat Session::v_format() const noexcept { return impl_->options.v_format; }
std::size_t Session::kv_bytes() const noexcept {
  return impl_->closed ? 0 : impl_->memory->cache.layout().nbytes();
}
std::size_t Session::nbytes() const noexcept {
  if (impl_->closed) return 0;
  return kv_bytes() + impl_->memory->region.bytes().size() + impl_->ids.capacity() * sizeof(std::int32_t) +
         impl_->rows.capacity() * sizeof(Row);
}
const std::shared_ptr<const Model>& Session::model() const noexcept { return impl_->model; }

}  // namespace ringlm

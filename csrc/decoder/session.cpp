#include "ringlm/session.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
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
                          std::to_string(trained) + ", the length that the model was trained for" +
                          (c.rope_factor > 1.0 ? " times its RoPE scaling" : "") +
                          ", or leave it out for the default");
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

kv::Layout layout(const Config& c, const SessionOptions& o) {
  return {c.n_layer, c.n_head_kv, c.head_dim, o.n_ctx, o.k_format, o.v_format};
}

std::size_t session_bytes(const Config& c, const Ops& ops, const SessionOptions& o) {
  return layout(c, o).nbytes() + buffer_bytes(c, ops, o) + size(o.n_ctx) * sizeof(std::int32_t) +
         size(o.chunk) * sizeof(Row);
}

// Counts everything before anything is taken.
void check_memory(const Config& c, const Ops& ops, const SessionOptions& o) {
  const std::size_t there = host::available_memory();
  const std::size_t needed = session_bytes(c, ops, o);
  if (needed <= there) return;
  const auto fits = [&](std::int64_t n_ctx) {
    SessionOptions smaller = o;
    smaller.n_ctx = n_ctx;
    smaller.chunk = static_cast<std::int32_t>(std::min<std::int64_t>(o.chunk, n_ctx));
    return session_bytes(c, ops, smaller) <= there;
  };
  std::int64_t most = 0;  // the largest n_ctx that fits
  for (std::int64_t step = o.n_ctx; step > 0; step /= 2) {
    while (most + step < o.n_ctx && fits(most + step)) most += step;
  }
  throw OutOfMemory("a session of n_ctx = " + std::to_string(o.n_ctx) + " needs " +
                    host::format_bytes(needed) + ", " + host::format_bytes(layout(c, o).nbytes()) +
                    " of it for keys and values, but only " + host::format_bytes(there) + " is available; " +
                    (most > 0 ? "n_ctx = " + std::to_string(most) + " would fit"
                              : std::string("not even n_ctx = 1 would fit")));
}

}  // namespace

struct Session::Impl {
  Impl(std::shared_ptr<const Model> m, const SessionOptions& o) : model(std::move(m)), options(o) {
    const Model::Parts& p = model->parts();
    check_memory(p.config, *p.ops, o);
    memory = std::make_unique<Memory>(p.config, *p.ops, o);
    ids.resize(size(o.n_ctx));
    rows.reserve(size(o.chunk));
    nbytes = session_bytes(p.config, *p.ops, o);
  }

  // What close() gives back.
  struct Memory {
    Memory(const Config& c, const Ops& ops, const SessionOptions& o)
        : cache(layout(c, o)), region(buffer_bytes(c, ops, o), "the activations of a session") {
      Carver carver(region.bytes());
      buffers = carve(carver, c, ops, o);
    }
    kv::Cache cache;
    host::Region region;
    Buffers buffers;
  };

  std::shared_ptr<const Model> model;
  SessionOptions options;  // defaults filled in
  std::unique_ptr<Memory> memory;
  std::size_t nbytes = 0;  // of everything
  // The text so far. A step or rewind changes both under the mutex, so that tokens() may read at any time.
  mutable std::mutex text;
  std::vector<std::int32_t> ids;  // [n_ctx]; those before `position` are in the cache
  std::atomic<std::int64_t> position{0};
  std::vector<Row> rows;  // of the step that runs
  bool has_logits = false;
  std::atomic<bool> cancelled{false};
  std::atomic<bool> busy{false};
  std::atomic<bool> closed{false};
  std::chrono::steady_clock::time_point polled{};
  const std::function<void()> before_layer = [this] {
    if (cancelled.load(std::memory_order_relaxed)) throw Cancelled("the step was cancelled", 0);
    if (!options.poll) return;
    if (const auto now = std::chrono::steady_clock::now(); now - polled >= std::chrono::milliseconds(50)) {
      polled = now;
      options.poll();
    }
  };

  // One user at a time, for the length of a call.
  class Use {
   public:
    enum class Closed { Refused, Allowed };
    explicit Use(Impl& s, Closed closed = Closed::Refused) : s_(s) {
      s.model->parts().check_process();
      if (s.busy.exchange(true, std::memory_order_acquire)) {
        throw StateError("the session is busy in another thread: give every thread a session of its own");
      }
      if (s.closed &&
          closed == Closed::Refused) {  // looked at by the owner alone: nobody can close it from here on
        s.busy.store(false, std::memory_order_release);
        throw StateError("the session is closed: open a new one with model.session()");
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
    const std::int64_t first = position;
    rows.clear();
    for (const std::int32_t token : tokens) {
      rows.push_back({token, first + static_cast<std::int64_t>(rows.size()), &memory->cache});
    }
    const Model::Parts& p = model->parts();
    run_step({p.config, p.weights, p.rope_frequencies, *p.ops}, {rows, memory->buffers.a}, out, before_layer);
    const std::lock_guard lock(text);
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
  s.has_logits = false;
  const std::lock_guard lock(s.text);
  s.position -= n;
}

void Session::cancel(bool wanted) noexcept { impl_->cancelled.store(wanted, std::memory_order_relaxed); }

void Session::close() {
  Impl& s = *impl_;
  if (s.closed) return;
  if (!s.model->parts().in_this_process()) {  // a copy, that no step is running on
    s.closed = true;
    s.memory.reset();
    return;
  }
  const Impl::Use use(s, Impl::Use::Closed::Allowed);
  s.closed = true;
  s.memory.reset();
}

bool Session::closed() const noexcept { return impl_->closed; }
std::int64_t Session::position() const noexcept { return impl_->position; }
std::vector<std::int32_t> Session::tokens() const {
  impl_->model->parts().check_process();  // another thread may have held the mutex when the process forked
  const std::lock_guard lock(impl_->text);
  return {impl_->ids.begin(), impl_->ids.begin() + impl_->position};
}
std::int64_t Session::n_ctx() const noexcept { return impl_->options.n_ctx; }
std::int32_t Session::chunk() const noexcept { return impl_->options.chunk; }
KvFormat Session::k_format() const noexcept { return impl_->options.k_format; }
KvFormat Session::v_format() const noexcept { return impl_->options.v_format; }
std::size_t Session::kv_bytes() const noexcept {
  return impl_->closed ? 0 : layout(impl_->model->config(), impl_->options).nbytes();
}
std::size_t Session::nbytes() const noexcept { return impl_->closed ? 0 : impl_->nbytes; }
const std::shared_ptr<const Model>& Session::model() const noexcept { return impl_->model; }

}  // namespace ringlm

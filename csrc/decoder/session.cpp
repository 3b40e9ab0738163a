#include "ringlm/session.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "decoder/decoder.h"
#include "decoder/model_parts.h"
#include "decoder/session_impl.h"
#include "ringlm/error.h"

namespace ringlm {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace

Session::Impl::Impl(std::shared_ptr<const Model> m, const SessionOptions& o)
    : model(std::move(m)), options(o), memory(*model, o) {
  nbytes = memory.nbytes();
  kv_bytes = memory.cache.bytes().size();
  for (std::int32_t i = 0; i <= model->config().n_layer; ++i) memory.held_from[size(i)] = ring(i).pinned;
  for (std::int32_t i = 1; i < model->config().n_layer; ++i) {
    if (ring(i).visible > ring(widest).visible) widest = i;
  }
}

void Session::Impl::poll() {
  if (!options.poll) return;
  if (const auto now = std::chrono::steady_clock::now(); now - polled >= std::chrono::milliseconds(50)) {
    polled = now;
    options.poll();
  }
}

void Session::Impl::hear() {
  if (cancelled.load(std::memory_order_relaxed)) throw Cancelled("the step was cancelled", 0);
  poll();
}

kv::Ring Session::Impl::ring(std::int32_t layer) const {
  return layer < model->config().n_layer ? kv_layout(model->config(), options).ring(layer) : text_ring();
}

std::int64_t Session::Impl::oldest_seen(std::int32_t layer) const {
  const std::int64_t p = position;
  return std::min(p, std::max(ring(layer).oldest(p - 1), memory.held_from[size(layer)]));
}

void Session::Impl::acquire(bool closed_too) {
  model->parts().check_process();
  if (busy.exchange(true, std::memory_order_acquire)) {
    throw StateError("the session is busy in another thread: give every thread a session of its own");
  }
  if (closed && !closed_too) {  // looked at by the owner alone: nobody can close it from here on
    release();
    throw StateError("the session is closed: open a new one with model.session()");
  }
}

void Session::Impl::check_tokens(std::span<const std::int32_t> tokens) const {
  if (tokens.empty())
    throw InvalidArgument("there are no tokens to feed: an empty prompt needs at least the BOS token");
  const std::int32_t n_vocab = model->config().n_vocab;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= n_vocab) {
      throw InvalidArgument("token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                            "; the vocabulary has ids 0 to " + std::to_string(n_vocab - 1));
    }
  }
  if (options.overflow == Overflow::Slide) return;
  const std::size_t left = size(options.n_ctx - position);
  if (tokens.size() > left) {
    throw ContextOverflow(
        std::to_string(tokens.size()) + " tokens do not fit: " + std::to_string(position) +
        " of n_ctx = " + std::to_string(options.n_ctx) + " are in use, " + std::to_string(left) +
        " are left. Shorten the text, rewind, or open the session with a larger n_ctx or overflow=\"slide\"");
  }
}

// A step that fails has written its rows all the same: over what no query at `position` sees, but a rewind
// might.
void Session::Impl::begin(std::size_t n_tokens) {
  const std::int64_t end = position + static_cast<std::int64_t>(n_tokens);
  const std::lock_guard lock(text);
  for (std::int32_t i = 0; i <= model->config().n_layer; ++i) {
    const kv::Ring r = ring(i);
    std::int64_t& from = memory.held_from[size(i)];
    from = std::max(from, end - (r.capacity - r.pinned));
  }
}

void compute(Session::Impl& host, std::span<const Row> rows, const std::function<void()>& before_layer,
             std::array<double, kOperations.size()>* seconds) {
  const Model::Parts& p = host.model->parts();
  const std::span<std::uint8_t> bad = host.memory.bad.first(rows.size());
  std::optional<TimedOps> timed;
  if (seconds) timed.emplace(*p.ops, *seconds);
  Ops& ops = timed ? static_cast<Ops&>(*timed) : *p.ops;
  run_step({p.config, p.weights, p.ropes, ops}, {rows, host.memory.a, bad}, before_layer);
}

void name_the_layer(Session::Impl& host, const Row& row) {
  const Model::Parts& p = host.model->parts();
  std::uint8_t bad = 0;
  name_the_layer({p.config, p.weights, p.ropes, *p.ops}, Step{{&row, 1}, host.memory.a, {&bad, 1}});
}

void Session::Impl::step(StepKind kind, std::span<const std::int32_t> tokens, std::span<float> all, bool last,
                         bool at_once) {
  const Model::Parts& p = model->parts();
  const std::size_t n_vocab = size(p.config.n_vocab);
  const std::span<Row> rows = memory.rows.first(tokens.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    float* logits = !all.empty() ? all.data() + i * n_vocab : nullptr;
    if (all.empty() && last && i + 1 == rows.size()) logits = spare_logits().data();
    rows[i] = {tokens[i], position + static_cast<std::int64_t>(i), &memory.cache, logits, memory.tiles.data(),
               regime};
  }

  const bool keeps = memory.device && rows.size() == 1 && all.empty() && last && !at_once;
  if (keeps) {
    rows[0].kept = &memory.kept[size(1 - current)];
  } else if (last || !all.empty()) {
    fetch_logits();
  }

  begin(tokens.size());
  Measurement measurement(&trace);
  compute(*this, rows, before_layer, measurement.seconds());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (memory.bad[i]) name_the_layer(*this, rows[i]);
  }
  if (!all.empty() && last) {
    std::copy(all.end() - static_cast<std::ptrdiff_t>(n_vocab), all.end(), spare_logits().begin());
  }
  commit(tokens, last, keeps);
  measurement.stop();
  measurement.add_to(trace, kind, p.config, p.weights, rows);
}

void Session::Impl::make_ready(std::size_t n) {
  const Model::Parts& p = model->parts();
  const std::int64_t end = position;
  const std::int32_t wanted = p.ropes.regime(std::min(end + static_cast<std::int64_t>(n), options.n_ctx));
  if (wanted == regime) return;
  regime = -1;
  for (std::int64_t first = 0; first < end; first += options.chunk) {
    const std::span<Row> rows = memory.rows.first(size(std::min<std::int64_t>(options.chunk, end - first)));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t at = first + static_cast<std::int64_t>(i);
      const std::int32_t id = memory.ids[size(text_ring().slot(at))];
      rows[i] = {id, at, &memory.cache, nullptr, memory.tiles.data(), wanted};
    }
    Measurement measurement(&trace);
    compute(*this, rows, before_layer, measurement.seconds());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (memory.bad[i]) name_the_layer(*this, rows[i]);
    }
    measurement.stop();
    measurement.add_to(trace, StepKind::Rebuild, p.config, p.weights, rows);
  }
  regime = wanted;
}

void Session::Impl::commit(std::span<const std::int32_t> tokens, bool new_logits, bool kept_logits) {
  if (new_logits) current = 1 - current;
  has_logits = new_logits;
  kept = kept_logits;
  fetched = false;
  const kv::Ring r = text_ring();
  const std::lock_guard lock(text);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    memory.ids[size(r.slot(position + static_cast<std::int64_t>(i)))] = tokens[i];
  }
  position += static_cast<std::int64_t>(tokens.size());
}

std::span<const float> Session::Impl::logits() const {
  if (!has_logits) throw StateError("there are no logits: feed a token first");
  fetch_logits();
  return memory.logits[current];
}

void Session::Impl::fetch_logits() const {
  if (!has_logits || !kept || fetched) return;
  model->parts().ops->device()->copy(std::as_writable_bytes(memory.logits[current]),
                                     std::as_bytes(memory.device->logits(current)));
  fetched = true;
}

bool Session::Impl::can_go_to(std::int64_t p) const {
  for (std::int32_t i = 0; i < model->config().n_layer; ++i) {
    const std::int64_t oldest = ring(i).oldest(p);
    if (oldest < p && oldest < memory.held_from[size(i)]) return false;
  }
  return true;
}

void Session::Impl::go_to(std::int64_t p) {
  if (p == position) return;
  has_logits = false;
  const std::lock_guard lock(text);
  position = p;
  for (std::int32_t i = 0; i <= model->config().n_layer; ++i) {  // rows from p on will be written anew
    std::int64_t& from = memory.held_from[size(i)];
    from = std::min(from, std::max(p, ring(i).pinned));
  }
}

Session::Session(std::shared_ptr<const Model> model, const SessionOptions& options) {
  if (!model) throw InvalidArgument("a session needs a model");
  model->parts().check_process();
  const SessionOptions o = resolve(*model, options);
  impl_ = std::make_unique<Impl>(std::move(model), o);
}

std::unique_ptr<Session> Session::wrap(std::unique_ptr<Impl> impl) {
  std::unique_ptr<Session> session(new Session());
  session->impl_ = std::move(impl);
  return session;
}

Session::~Session() = default;

void Session::prefill(std::span<const std::int32_t> tokens, std::span<float> out, const Progress& progress) {
  Impl& s = *impl_;
  const Impl::Use use(s);
  s.check_tokens(tokens);
  const std::size_t n_vocab = size(s.model->config().n_vocab);
  if (!out.empty() && out.size() != n_vocab && out.size() != tokens.size() * n_vocab) {
    throw InvalidArgument("out has " + std::to_string(out.size()) + " elements; expected " +
                          std::to_string(n_vocab) + ", or " + std::to_string(tokens.size()) +
                          " tokens times as many");
  }
  const std::span<float> all = out.size() == n_vocab ? std::span<float>{} : out;
  std::size_t done = 0;
  while (done < tokens.size()) {
    const std::size_t n = std::min(size(s.options.chunk), tokens.size() - done);
    try {
      s.make_ready(tokens.size() - done);
      s.step(StepKind::Prefill, tokens.subspan(done, n),
             all.empty() ? all : all.subspan(done * n_vocab, n * n_vocab), done + n == tokens.size(),
             !out.empty());
    } catch (const Cancelled&) {
      s.cancelled = false;
      throw Cancelled("the prefill was cancelled with " + std::to_string(done) + " of " +
                          std::to_string(tokens.size()) + " tokens in the cache",
                      done);
    }
    done += n;
    if (progress) progress(done, tokens.size());
  }
  if (all.empty() && !out.empty()) std::ranges::copy(s.logits(), out.begin());
}

void Session::decode(std::int32_t token, std::span<float> out) {
  Impl& s = *impl_;
  const Impl::Use use(s);
  const std::span<const std::int32_t> one(&token, 1);
  s.check_tokens(one);
  if (const std::size_t n_vocab = size(s.model->config().n_vocab); !out.empty() && out.size() != n_vocab) {
    throw InvalidArgument("out has " + std::to_string(out.size()) + " elements; expected " +
                          std::to_string(n_vocab));
  }
  try {
    s.make_ready(1);
    s.step(StepKind::Decode, one, {}, true, !out.empty());
  } catch (const Cancelled&) {
    s.cancelled = false;
    throw;
  }
  if (!out.empty()) std::ranges::copy(s.logits(), out.begin());
}

std::span<const float> Session::logits() const {
  const Impl::Use use(*impl_);
  return impl_->logits();
}

std::int32_t Session::sample(Sampler& sampler) const {
  const Impl& s = *impl_;
  const Impl::Use use(*impl_);
  const std::int32_t n_vocab = s.model->config().n_vocab;
  const std::int32_t n = std::min(kTopLogits, n_vocab - 1);
  if (s.has_logits && s.kept && sampler.n_vocab() == n_vocab && sampler.n_needed() <= n) {
    const TopLogits& largest = s.memory.kept[size(s.current)].largest;
    return sampler.sample(std::span(largest.ids).first(size(n)), std::span(largest.logits).first(size(n)));
  }
  return sampler.sample(s.logits());
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
  const std::int64_t p = s.position;
  if (n < 0 || n > p) {
    throw InvalidArgument("cannot rewind by " + std::to_string(n) + " tokens; expected 0 to " +
                          std::to_string(p));
  }
  if (!s.can_go_to(p - n)) {
    std::int64_t most = 0;
    while (s.can_go_to(p - most - 1)) ++most;  // ends at n at the latest
    throw InvalidArgument(
        "cannot rewind by " + std::to_string(n) +
        " tokens: the ring has wrapped, and of the rows "
        "that the text back there sees some are gone. Rewind by at most " +
        std::to_string(most) + ", or to the beginning (by " + std::to_string(p) + ")" +
        (s.options.pinned > 0 && s.can_go_to(s.options.pinned)
             ? ", or to the pinned tokens (by at least " + std::to_string(p - s.options.pinned) + ")"
             : ""));
  }
  s.go_to(p - n);
}

std::int64_t Session::reuse(std::span<const std::int32_t> tokens) {
  Impl& s = *impl_;
  const Impl::Use use(s);
  const kv::Ring ring = s.text_ring();
  const std::int64_t held_from = s.memory.held_from.back();
  const std::int64_t most =
      std::min<std::int64_t>(s.position, std::max<std::int64_t>(std::ssize(tokens) - 1, 0));
  std::int64_t same = 0;
  while (same < most && (same < ring.pinned || same >= held_from) &&
         tokens[size(same)] == s.memory.ids[size(ring.slot(same))]) {
    ++same;
  }
  if (!s.can_go_to(same)) same = std::min(same, s.options.pinned);
  if (!s.can_go_to(same)) same = 0;
  s.go_to(same);
  return same;
}

void Session::cancel(bool wanted) noexcept { impl_->cancelled.store(wanted, std::memory_order_relaxed); }

void Session::start_trace(std::size_t capacity, std::function<std::int64_t()> allocations) {
  constexpr std::size_t most = 1 << 20;
  if (capacity > most) {
    throw InvalidArgument("a trace of " + std::to_string(capacity) +
                          " records was asked for; expected at most " + std::to_string(most));
  }
  const Impl::Use use(*impl_);
  impl_->trace = {std::vector<TraceRecord>(capacity), 0, 0, std::move(allocations)};
}

std::vector<TraceRecord> Session::take_trace() {
  const Impl::Use use(*impl_);
  return impl_->trace.take();
}

void Session::close() {
  Impl& s = *impl_;
  if (s.closed) return;
  if (!s.model->parts().in_this_process()) {  // a copy, that no step is running on
    s.closed = true;
    s.memory = {};
    return;
  }
  const Impl::Use use(s, true);
  s.closed = true;
  const std::lock_guard lock(s.text);
  s.memory = {};
}

bool Session::closed() const noexcept { return impl_->closed; }
std::int64_t Session::position() const noexcept { return impl_->position; }

std::int64_t Session::visible() const noexcept {
  return std::min(position(), impl_->ring(impl_->widest).visible);
}

std::vector<std::int32_t> Session::tokens() const {
  const Impl& s = *impl_;
  s.model->parts().check_process();  // another thread may have held the mutex when the process forked
  const std::lock_guard lock(s.text);
  std::vector<std::int32_t> ids;
  if (s.closed) return ids;
  const kv::Ring text = s.text_ring();
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) ids.push_back(s.memory.ids[size(text.slot(t))]);
  };
  add(0, std::min<std::int64_t>(s.ring(s.widest).pinned, s.position));
  add(s.oldest_seen(s.widest), s.position);
  return ids;
}

std::int64_t Session::slots() const noexcept { return impl_->ring(impl_->widest).capacity; }
SessionPlan Session::plan() const { return plan_session(*impl_->model, impl_->options); }
std::int64_t Session::n_ctx() const noexcept { return impl_->options.n_ctx; }
std::int32_t Session::chunk() const noexcept { return impl_->options.chunk; }
std::int64_t Session::pinned() const noexcept { return impl_->options.pinned; }
Overflow Session::overflow() const noexcept { return impl_->options.overflow; }
KvFormat Session::k_format() const noexcept { return impl_->options.k_format; }
KvFormat Session::v_format() const noexcept { return impl_->options.v_format; }
std::size_t Session::kv_bytes() const noexcept { return impl_->closed ? 0 : impl_->kv_bytes; }
std::size_t Session::nbytes() const noexcept { return impl_->closed ? 0 : impl_->nbytes; }
const std::shared_ptr<const Model>& Session::model() const noexcept { return impl_->model; }

}  // namespace ringlm

// Several sessions in one step: the weights are read once for all of them.
#include <algorithm>
#include <string>

#include "decoder/model_parts.h"
#include "decoder/session_impl.h"
#include "ringlm/error.h"
#include "ringlm/session.h"

namespace ringlm {
namespace {

void check_batch(std::span<Session* const> sessions, std::span<const std::int32_t> tokens) {
  if (sessions.size() != tokens.size()) {
    throw InvalidArgument("there are " + std::to_string(sessions.size()) + " sessions and " +
                          std::to_string(tokens.size()) + " tokens; expected one for each");
  }
  for (std::size_t i = 0; i < sessions.size(); ++i) {
    if (sessions[i]->model() != sessions[0]->model()) {
      throw InvalidArgument("session " + std::to_string(i) + " is of another model than session 0");
    }
    if (std::find(sessions.begin(), sessions.begin() + static_cast<std::ptrdiff_t>(i), sessions[i]) !=
        sessions.begin() + static_cast<std::ptrdiff_t>(i)) {
      throw InvalidArgument("session " + std::to_string(i) + " is in the batch twice");
    }
  }
}

// The current exception. Only a cancel that was heard is over.
std::exception_ptr heard(Session::Impl& s) {
  try {
    throw;
  } catch (const Cancelled&) {
    s.cancelled = false;
  } catch (...) {
  }
  return std::current_exception();
}

}  // namespace

std::vector<std::exception_ptr> step(std::span<Session* const> sessions,
                                     std::span<const std::int32_t> tokens) {
  check_batch(sessions, tokens);
  const std::size_t n = sessions.size();
  std::vector<std::exception_ptr> errors(n);
  std::vector<std::unique_ptr<Session::Impl::Use>> uses(n);
  std::vector<std::size_t> ready;
  Session::Impl* host = nullptr;  // the one whose buffers take the most rows
  for (std::size_t i = 0; i < n; ++i) {
    Session::Impl& s = *sessions[i]->impl_;
    try {
      uses[i] = std::make_unique<Session::Impl::Use>(s);
      s.check_tokens(tokens.subspan(i, 1));
      s.hear();
      s.make_ready(1);
      ready.push_back(i);
      if (!host || s.options.chunk > host->options.chunk) host = &s;
    } catch (...) {
      errors[i] = heard(s);
    }
  }

  for (std::size_t first = 0; first < ready.size();) {
    const std::size_t M = std::min(host->memory.rows.size(), ready.size() - first);
    const std::span<const std::size_t> group = std::span(ready).subspan(first, M);
    const std::span<Row> rows = host->memory.rows.first(M);
    const Trace* traced = nullptr;
    for (std::size_t m = 0; m < M; ++m) {
      Session::Impl& s = *sessions[group[m]]->impl_;
      rows[m] = {tokens[group[m]],      s.position, &s.memory.cache, s.spare_logits().data(),
                 s.memory.tiles.data(), s.regime};
      s.begin(1);
      if (s.trace.on()) traced = &s.trace;
    }
    Measurement measurement(traced);
    try {
      host->fetch_logits();
      compute(*host, rows, [&] { host->poll(); }, measurement.seconds());
    } catch (...) {  // of an operation, or of poll(): nobody from here on advances
      for (; first < ready.size(); ++first) errors[ready[first]] = std::current_exception();
      break;
    }
    measurement.stop();
    std::vector<std::uint8_t> bad(host->memory.bad.begin(),
                                  host->memory.bad.begin() + static_cast<std::ptrdiff_t>(M));
    for (std::size_t m = 0; m < M; ++m) {
      Session::Impl& s = *sessions[group[m]]->impl_;
      try {
        s.hear();
        if (bad[m]) name_the_layer(*host, rows[m]);
        s.commit(tokens.subspan(group[m], 1), true);
        const Model::Parts& parts = s.model->parts();
        measurement.add_to(s.trace, StepKind::Decode, parts.config, parts.weights, rows.subspan(m, 1));
      } catch (...) {
        errors[group[m]] = heard(s);
      }
    }
    first += M;
  }
  return errors;
}

}  // namespace ringlm

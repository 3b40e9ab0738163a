// A session: one text on its way through a model. It owns the K/V cache, the activations and the position,
// all allocated when it opens.
//
// A step is one decoded token or one prefill chunk. It writes K/V at `position`, produces logits and advances
// `position` as one: when it throws, position and tokens are as before the step and the logits of the step
// before are gone. (A prefill keeps its finished chunks.) One thread uses a session at a time; a second one
// gets a StateError. cancel(), position(), tokens() and the sizes may be asked from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ringlm/kv_format.h"
#include "ringlm/model.h"
#include "ringlm/sampler.h"

namespace ringlm {

struct SessionOptions {
  std::int64_t n_ctx = 0;    // tokens that fit; 0: the smaller of 4096 and the trained length
  std::int32_t chunk = 128;  // tokens of a prefill that are computed together
  KvFormat k_format = KvFormat::F16;
  KvFormat v_format = KvFormat::F16;
  // Called by a running step between two layers, at most twenty times a second, so that the caller can look
  // for signals. What it throws ends the step.
  std::function<void()> poll = {};
};

class Session {
 public:
  // Throws InvalidArgument for an option out of range, OutOfMemory, before anything is allocated, when it
  // cannot fit.
  explicit Session(std::shared_ptr<const Model> model, const SessionOptions& options = {});
  ~Session();

  // Called behind every chunk with the number of tokens done and the total. What it throws ends the prefill;
  // finished chunks stay.
  using Progress = std::function<void(std::size_t done, std::size_t total)>;

  // Feeds tokens. all_logits: empty, or [n_tokens, n_vocab] to receive the logits behind every token. Throws
  // ContextOverflow and InvalidArgument (empty, or an id outside the vocabulary) before anything is computed,
  // Cancelled with the number of tokens consumed, NumericError, StateError.
  void prefill(std::span<const std::int32_t> tokens, std::span<float> all_logits = {},
               const Progress& progress = {});

  // Feeds one token. Throws as prefill does.
  void decode(std::int32_t token);

  // Behind the last token fed: [n_vocab], valid until the next step. Throws StateError when there are none.
  std::span<const float> logits() const;

  // What sampler.h does, on these logits. Throw as logits() and the function there do.
  std::int32_t sample(Sampler& sampler) const;
  float log_probability(std::int32_t id) const;
  std::vector<LogProb> top_log_probabilities(std::int32_t k) const;

  // Forgets the last n tokens. Logits are gone: at least one token has to be fed before the next draw. Throws
  // InvalidArgument for more than there are.
  void rewind(std::int64_t n);

  // From any thread: the running step, or else the next one to begin, throws Cancelled, between two layers.
  // cancel(false) takes back what no step has heard yet.
  void cancel(bool wanted = true) noexcept;

  // Frees the memory. Idempotent, and allowed in a child of fork(); everything else then throws StateError.
  void close();
  bool closed() const noexcept;

  std::int64_t position() const noexcept;    // tokens fed so far
  std::vector<std::int32_t> tokens() const;  // their ids
  std::int64_t n_ctx() const noexcept;
  std::int32_t chunk() const noexcept;
  KvFormat k_format() const noexcept;
  KvFormat v_format() const noexcept;
  std::size_t kv_bytes() const noexcept;  // of the K/V rows, 0 when closed
  std::size_t nbytes() const noexcept;    // of everything that was allocated when it opened, 0 when closed
  const std::shared_ptr<const Model>& model() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringlm

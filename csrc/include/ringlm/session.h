// A session: one text on its way through a model. It owns the K/V cache, the activations and the position,
// all allocated when it opens; nothing grows, moves or is computed again afterwards, for as long as it runs.
//
// The cache is a ring (kv/ring.h): n_ctx tokens are visible, the first `pinned` of them for ever. With
// Overflow::Slide the text may go on without end; the oldest tokens that are not pinned leave.
//
// A step is one decoded token or one prefill chunk. It writes K/V at `position`, produces logits and advances
// `position` as one: when it throws, everything that a later step can see is as before. (A prefill keeps its
// finished chunks.) One thread uses a session at a time; a second one gets a StateError. cancel(),
// position(), tokens() and the sizes may be asked from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ringlm/kv_format.h"
#include "ringlm/model.h"
#include "ringlm/sampler.h"
#include "ringlm/trace.h"

namespace ringlm {

enum class Overflow {
  Error,  // tokens that do not fit into n_ctx are a ContextOverflow
  Slide,  // the oldest tokens that are not pinned leave
};

struct SessionOptions {
  std::int64_t n_ctx = 0;    // tokens that a query sees; 0: the smaller of 4096 and the trained length
  std::int32_t chunk = 128;  // tokens of a prefill that are computed together
  KvFormat k_format = KvFormat::F16;
  KvFormat v_format = KvFormat::F16;
  std::int64_t pinned = 0;  // the first tokens, that never leave; fewer than n_ctx
  Overflow overflow = Overflow::Error;
  // Called by a running step between two layers, at most twenty times a second, so that the caller can look
  // for signals. What it throws ends the step.
  std::function<void()> poll = {};
};

// Layers whose rings are alike.
struct LayerKind {
  std::int32_t window;    // of the model's attention, 0: none
  std::int32_t n_layer;   // how many there are
  std::int64_t visible;   // most tokens that a query sees
  std::int64_t pinned;    // of these
  std::int64_t capacity;  // rows per KV head
  std::size_t nbytes;     // of all their K and V rows together
};

// What a session takes, in bytes.
struct SessionPlan {
  SessionOptions options;            // defaults filled in
  std::vector<LayerKind> kinds;      // in the order of their first layers
  std::size_t kv_bytes = 0;          // of the K/V rows, scales included
  std::size_t activation_bytes = 0;  // of a chunk on its way through a layer
  std::size_t scratch_bytes = 0;     // of attention
  std::size_t state_bytes = 0;       // token ids, logits, bookkeeping
  std::size_t nbytes = 0;            // of everything
  std::size_t device_bytes = 0;      // of these, in the memory of a GPU
};

// Throws InvalidArgument for an option out of range. Opens nothing.
SessionPlan plan_session(const Model& model, const SessionOptions& options = {});

// The largest n_ctx with which a session takes at most `memory` bytes, up to the trained length; 0 if none
// does.
std::int64_t largest_n_ctx(const Model& model, const SessionOptions& options, std::size_t memory);

// Rows of one layer and KV head that the last token saw, in ascending position.
struct KvRows {
  std::vector<std::int64_t> positions;  // [n]
  std::vector<float> k;                 // [n, head_dim] after RoPE
  std::vector<float> v;                 // [n, head_dim]
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

  // Feeds tokens. out: empty, [n_vocab] to receive the logits behind the last token, or [n_tokens, n_vocab]
  // those behind every token. Throws ContextOverflow and InvalidArgument (empty, or an id outside the
  // vocabulary) before anything is computed, Cancelled with the number of tokens consumed, NumericError,
  // StateError.
  void prefill(std::span<const std::int32_t> tokens, std::span<float> out = {},
               const Progress& progress = {});

  // Feeds one token. out: empty, or [n_vocab]. Throws as prefill does.
  void decode(std::int32_t token, std::span<float> out = {});

  // Behind the last token fed: [n_vocab], valid until the next step but one. Throws StateError when there are
  // none, DeviceError where they cannot be fetched from the GPU.
  std::span<const float> logits() const;

  // What sampler.h does, on these logits. Throw as logits() and the function there do.
  std::int32_t sample(Sampler& sampler) const;
  float log_probability(std::int32_t id) const;
  std::vector<LogProb> top_log_probabilities(std::int32_t k) const;

  // Forgets the last n tokens. Logits are gone: at least one token has to be fed before the next draw. Where
  // a ring has wrapped, rows that the next query would see may be gone: throws InvalidArgument, which says
  // how far back it goes, then and for more tokens than there are.
  void rewind(std::int64_t n);

  // Goes back to the longest prefix of all `tokens` but the last one that the cache holds and can go back to;
  // returns its length. Leaves at least one token to be fed, as logits come from feeding.
  std::int64_t reuse(std::span<const std::int32_t> tokens);

  // An independent copy, with everything but a cancel and a trace. Throws as the constructor does.
  std::unique_ptr<Session> fork() const;

  // The options, position, ids, logits and the rows that the next query sees (of a session that does not
  // slide and has no windows, all of them), in position order, as consecutive pieces. What `write` throws
  // ends it.
  using Write = std::function<void(std::span<const std::byte>)>;
  void save(const Write& write) const;

  // A session as it was saved. `read` fills the span or throws. Throws FileFormatError for bytes that are no
  // state or that of a model of another shape, OutOfMemory. The bytes must be trusted to be what save()
  // wrote: a caller that reads them from a file verifies them first.
  using Read = std::function<void(std::span<std::byte>)>;
  static std::unique_ptr<Session> load(std::shared_ptr<const Model> model, const Read& read,
                                       const std::function<void()>& poll = {});

  // For debugging. Throws InvalidArgument for a layer or KV head that is not there.
  KvRows kv_rows(std::int32_t layer, std::int32_t head) const;

  // From any thread: the running step, or else the next one to begin, throws Cancelled, between two layers.
  // cancel(false) takes back what no step has heard yet.
  void cancel(bool wanted = true) noexcept;

  // Keeps a record of each of the last `capacity` steps from now on; 0 ends it. `allocations` counts the
  // process's heap allocations, where the caller can.
  void start_trace(std::size_t capacity, std::function<std::int64_t()> allocations = {});
  std::vector<TraceRecord> take_trace();  // the oldest first; they are gone then

  // Frees the memory. Idempotent, and allowed in a child of fork(); everything else then throws StateError.
  void close();
  bool closed() const noexcept;

  std::int64_t position() const noexcept;  // tokens fed so far
  std::int64_t visible() const noexcept;   // tokens that the last one saw, in the layers that see most
  std::vector<std::int32_t> tokens()
      const;                            // their ids as far as they are there: pinned ones, then the others
  std::int64_t slots() const noexcept;  // rows per KV head of these layers
  SessionPlan plan() const;             // what it took when it opened
  std::int64_t n_ctx() const noexcept;
  std::int32_t chunk() const noexcept;
  std::int64_t pinned() const noexcept;
  Overflow overflow() const noexcept;
  KvFormat k_format() const noexcept;
  KvFormat v_format() const noexcept;
  std::size_t kv_bytes() const noexcept;  // of the K/V rows, 0 when closed
  std::size_t nbytes() const noexcept;    // of everything that was allocated when it opened, 0 when closed
  const std::shared_ptr<const Model>& model() const noexcept;

  struct Impl;  // for the rest of the library

 private:
  Session() = default;  // without an impl_ yet
  static std::unique_ptr<Session> wrap(std::unique_ptr<Impl> impl);
  friend std::vector<std::exception_ptr> step(std::span<Session* const> sessions,
                                              std::span<const std::int32_t> tokens);
  std::unique_ptr<Impl> impl_;
};

// Decodes one token in each of several sessions of one model, reading the weights once. Rows never mix: every
// session is as if it had decoded alone, bit for bit (on a GPU up to eight; in larger batches they round
// differently). Entry i is null, or what session i threw, which is as before then. Throws InvalidArgument
// when the sessions are not distinct or not of one model.
std::vector<std::exception_ptr> step(std::span<Session* const> sessions,
                                     std::span<const std::int32_t> tokens);

}  // namespace ringlm

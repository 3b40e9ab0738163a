// What a Session holds, for the files that implement it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "decoder/session_memory.h"
#include "decoder/trace.h"
#include "ringlm/session.h"

namespace ringlm {

struct Session::Impl {
  // `o` has its defaults filled in.
  Impl(std::shared_ptr<const Model> m, const SessionOptions& o);

  std::shared_ptr<const Model> model;
  SessionOptions options;
  SessionMemory memory;  // close() gives it back
  std::size_t nbytes = 0;
  std::size_t kv_bytes = 0;
  std::int32_t widest = 0;  // the first layer whose queries see most
  // Position, ids and held_from change under the mutex, so that tokens() may read them at any time.
  mutable std::mutex text;
  std::atomic<std::int64_t> position{0};
  // Of the angles that the rows were turned by (model/rope.h), or -1: the rows count for nothing and are
  // computed again before the next step.
  std::int32_t regime = 0;
  int current = 0;  // of memory.logits: those of the last step
  bool has_logits = false;
  bool kept = false;             // the last step left its logits on the device, the largest in memory.kept
  mutable bool fetched = false;  // those are in memory.logits, too, by now
  std::atomic<bool> cancelled{false};
  std::atomic<bool> busy{false};
  std::atomic<bool> closed{false};
  std::chrono::steady_clock::time_point polled{};
  Trace trace;
  const std::function<void()> before_layer = [this] { hear(); };

  void hear();  // throws Cancelled, or what poll() throws
  void poll();

  kv::Ring text_ring() const { return kv::make_ring(0, options.n_ctx, options.pinned, options.chunk); }
  // The ring of a layer, or the text's own behind the last one.
  kv::Ring ring(std::int32_t layer) const;
  // The moving positions that the last token saw and that are still there begin here, at `position` at the
  // latest.
  std::int64_t oldest_seen(std::int32_t layer) const;

  // What other calls see to be free is taken, or StateError is thrown.
  void acquire(bool closed_too = false);
  void release() { busy.store(false, std::memory_order_release); }

  // One user at a time, for the length of a call.
  class Use {
   public:
    explicit Use(Impl& s, bool closed_too = false) : s_(s) { s.acquire(closed_too); }
    ~Use() { s_.release(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Impl& s_;
  };

  void check_tokens(std::span<const std::int32_t> tokens) const;

  // A step has three parts. begin() says which rows it may write over, compute() writes them, commit() moves
  // on.
  void begin(std::size_t n_tokens);
  void commit(std::span<const std::int32_t> tokens, bool new_logits, bool kept_logits = false);

  // One atomic step of at most `chunk` tokens. Logits of all go to `all` [n, n_vocab], where that is not
  // empty; those of the last one are held when `last`, on the device unless somebody wants them at once.
  void step(StepKind kind, std::span<const std::int32_t> tokens, std::span<float> all, bool last,
            bool at_once);

  // Where the angles of a text that is n tokens longer are others, all rows are computed again from the kept
  // ids. When it throws, the next call begins anew.
  void make_ready(std::size_t n);

  std::span<float> spare_logits() { return memory.logits[1 - current]; }
  std::span<const float> logits() const;
  // Brings to the host what the device has kept of them. Steps that keep none write over both rows.
  void fetch_logits() const;

  // Whether all rows that a query at p would see before its own are there.
  bool can_go_to(std::int64_t p) const;
  void go_to(std::int64_t p);
};

// Runs the model over `rows` with the buffers of `host`, and fills host's memory.bad. seconds, where not
// null, gets those of each operation.
void compute(Session::Impl& host, std::span<const Row> rows, const std::function<void()>& before_layer,
             std::array<double, kOperations.size()>* seconds);

// Throws NumericError for a row that compute() found bad.
[[noreturn]] void name_the_layer(Session::Impl& host, const Row& row);

}  // namespace ringlm

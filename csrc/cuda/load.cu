#include "cuda/load.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <span>
#include <string>

#include "host/memory.h"
#include "ringlm/error.h"

namespace ringlm::cuda {
namespace {

constexpr std::size_t aligned(std::size_t n) { return (n + 255) / 256 * 256; }

// One matrix, or those of all experts, which have the same type and shape.
using Matrices = std::vector<const Matrix*>;

std::size_t stride_of(const Matrix& m) { return aligned(packed_bytes(m.type, m.rows, m.cols)); }

// A vector as a matrix of one row. Its bytes are not of a file.
Matrix row_of(const Vector& v) {
  Matrix m;
  m.type = gguf::DType::F32;
  m.rows = v.empty() ? 0 : 1;
  m.cols = static_cast<std::int32_t>(v.size());
  m.row_bytes = v.size() * sizeof(float);
  m.data = std::as_bytes(std::span(v));
  return m;
}

// ---- what there is to load, in the order in which it lies in memory. `take` measures it, then uploads it.

template <class Take>
void each_part(const FeedForward& w, DeviceNetwork& d, Take& take) {
  take.matrices({&w.gate}, d.gate);
  take.matrices({&w.up}, d.up);
  take.matrices({&w.down}, d.down);
  take.vector(w.gate_bias, d.gate_bias);
  take.vector(w.up_bias, d.up_bias);
  take.vector(w.down_bias, d.down_bias);
}

template <class Take>
void each_expert(const LayerWeights& w, DeviceLayer& d, Take& take) {
  take.matrices({&w.router}, d.router);
  const auto all = [&](Matrix FeedForward::* part) {
    Matrices m;
    for (std::int32_t i = 0; i < w.router.rows; ++i)
      m.push_back(&(w.experts[static_cast<std::size_t>(i)].*part));
    return m;
  };
  take.matrices(all(&FeedForward::gate), d.experts.gate);
  take.matrices(all(&FeedForward::up), d.experts.up);
  take.matrices(all(&FeedForward::down), d.experts.down);
  if (w.shared_gate.empty()) return;
  each_part(w.experts.back(), d.shared, take);
  take.row(w.shared_gate, d.shared_gate);
}

template <class Take>
void each_part(const LayerWeights& w, DeviceLayer& d, Take& take) {
  take.vector(w.attn_norm, d.attn_norm);
  take.matrices({&w.q}, d.q);
  take.matrices({&w.k}, d.k);
  take.matrices({&w.v}, d.v);
  take.vector(w.q_bias, d.q_bias);
  take.vector(w.k_bias, d.k_bias);
  take.vector(w.v_bias, d.v_bias);
  take.vector(w.q_norm, d.q_norm);
  take.vector(w.k_norm, d.k_norm);
  take.matrices({&w.out}, d.out);
  take.vector(w.out_bias, d.out_bias);
  take.vector(w.attn_post_norm, d.attn_post_norm);
  take.vector(w.ffn_norm, d.ffn_norm);
  if (w.experts.empty()) {
    each_part(w.ff, d.ff, take);
  } else {
    each_expert(w, d, take);
  }
  take.vector(w.ffn_post_norm, d.ffn_post_norm);
}

template <class Take>
void each_other_part(const Weights& w, DeviceWeights& d, Take& take) {
  take.matrices({&w.token_embd}, d.token_embd);
  take.vector(w.output_norm, d.output_norm);
  if (!w.tied) take.matrices({&w.head}, d.head);
}

// ---- first pass

struct Measure {
  std::size_t bytes = 0;   // of this piece of memory
  std::size_t widest = 0;  // bytes of a row
  std::set<gguf::DType> refused{};

  void matrices(const Matrices& all, DeviceMatrix&) {
    const Matrix& m = *all.front();
    if (m.rows == 0) return;
    widest = std::max(widest, m.row_bytes);
    if (can_pack(m.type)) {
      bytes += all.size() * stride_of(m);
    } else {
      refused.insert(m.type);
    }
  }
  void row(const Vector& v, DeviceMatrix& to) {
    const Matrix m = row_of(v);
    matrices({&m}, to);
  }
  void vector(const Vector& v, const float*&) { bytes += aligned(v.size() * sizeof(float)); }
};

struct Sizes {
  std::vector<std::size_t> pieces;  // of each layer, then of the rest
  std::size_t total = 0, widest = 0;
};

std::string names(const std::set<gguf::DType>& types) {
  std::string text;
  for (const gguf::DType type : types)
    text += (text.empty() ? "" : ", ") + std::string(gguf::traits(type).name);
  return text;
}

Sizes measure(const Weights& w) {
  DeviceWeights unused{};
  DeviceLayer unused_layer{};
  Sizes sizes;
  Measure all;
  const auto add = [&] {
    sizes.pieces.push_back(all.bytes);
    sizes.total += all.bytes;
    all.bytes = 0;
  };
  for (const LayerWeights& layer : w.layers) {
    each_part(layer, unused_layer, all);
    add();
  }
  each_other_part(w, unused, all);
  add();
  sizes.widest = all.widest;
  if (all.refused.empty()) return sizes;
  std::set<gguf::DType> taken;
  for (const gguf::TypeTraits& t : gguf::all_types()) {
    if (can_pack(t.type)) taken.insert(t.type);
  }
  throw UnsupportedModelError("the model has matrices of type " + names(all.refused) +
                              ", which the CUDA backend does not compute with; it does with " + names(taken) +
                              ": make such a file with `ringlm quantize`, or use device='cpu'");
}

// ---- second pass

// Through two pinned buffers, so that the next piece comes from the file while one is under way.
class Loader {
 public:
  Loader(std::size_t bytes)
      : staging_(bytes, "loading weights"),
        pinned_{PinnedMemory(bytes, "loading weights"), PinnedMemory(bytes, "loading weights")} {}
  ~Loader() { cudaStreamSynchronize(stream_.get()); }  // before what it reads and writes goes
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // What follows goes there, one behind the other.
  void into(const DeviceMemory& memory) { at_ = memory.data(); }

  void matrices(const Matrices& all, DeviceMatrix& to) {
    const Matrix& first = *all.front();
    if (first.rows == 0) return;
    const std::size_t stride = stride_of(first);
    to = {first.type, first.rows, first.cols, at_, all.size() > 1 ? stride : 0};
    for (const Matrix* m : all) {
      send(*m, to, true);
      host::drop_pages(m->data);  // those, too, of which pieces had a part each
      at_ += stride;
    }
  }

  void row(const Vector& v, DeviceMatrix& to) {
    if (v.empty()) return;
    const Matrix m = row_of(v);
    to = {m.type, m.rows, m.cols, at_, 0};
    send(m, to, false);
    at_ += stride_of(m);
  }

  void vector(const Vector& v, const float*& to) {
    if (v.empty()) return;
    to = reinterpret_cast<const float*>(at_);
    const auto bytes = std::as_bytes(std::span(v));
    for (std::size_t done = 0; done < bytes.size(); done += staging_.size()) {
      const std::size_t n = std::min(staging_.size(), bytes.size() - done);
      copy(at_ + done, bytes.subspan(done, n));
    }
    at_ += aligned(bytes.size());
  }

  void finish() { stream_.synchronize("loading weights"); }

 private:
  void send(const Matrix& m, const DeviceMatrix& to, bool of_file) {
    const auto rows = static_cast<std::int64_t>(staging_.size() / m.row_bytes / kGroupRows * kGroupRows);
    for (std::int64_t first = 0; first < m.rows; first += rows) {
      const std::int64_t n = std::min<std::int64_t>(rows, m.rows - first);
      const auto piece = m.data.subspan(static_cast<std::size_t>(first) * m.row_bytes,
                                        static_cast<std::size_t>(n) * m.row_bytes);
      copy(staging_.data(), piece);
      pack(to, at_, staging_.data(), first, n, stream_.get());
      if (of_file) host::drop_pages(piece);
    }
  }

  void copy(std::uint8_t* to, std::span<const std::byte> bytes) {
    turn_ = 1 - turn_;
    copied_[turn_].wait("loading weights");
    std::memcpy(pinned_[turn_].data(), bytes.data(), bytes.size());
    check(cudaMemcpyAsync(to, pinned_[turn_].data(), bytes.size(), cudaMemcpyHostToDevice, stream_.get()),
          "loading weights");
    copied_[turn_].record(stream_.get());
  }

  DeviceMemory staging_;
  std::array<PinnedMemory, 2> pinned_;
  std::array<Event, 2> copied_;
  StreamHandle stream_;
  std::size_t turn_ = 0;
  std::uint8_t* at_ = nullptr;
};

void check_room(std::size_t weights, std::size_t staging) {
  const DeviceInfo gpu = device_info();
  const std::size_t needed = weights + (gpu.integrated ? 3 : 1) * staging;  // pinned memory is of the same
  const std::size_t there = free_device_memory();
  if (needed <= there) return;
  throw OutOfMemory("the weights need " + host::format_bytes(needed) + " of memory on the GPU, but only " +
                    host::format_bytes(there) + " of " + host::format_bytes(gpu.total_memory) +
                    " is available on " + gpu.name +
                    ": choose a model with fewer parameters or fewer bits a weight (`ringlm quantize`), end "
                    "what else uses the memory, or use device='cpu'");
}

}  // namespace

std::size_t device_weight_bytes(const Weights& weights) { return measure(weights).total; }

DeviceWeights load_weights(const Weights& w, const LoadOptions& options) {
  const Range range("load weights");
  const Sizes sizes = measure(w);
  const std::size_t staging = aligned(std::max(options.staging_bytes, kGroupRows * sizes.widest));
  check_room(sizes.total, staging);

  DeviceWeights d{};
  d.nbytes = sizes.total;
  for (const std::size_t bytes : sizes.pieces) d.memory.emplace_back(bytes, "allocating weights");
  Loader upload(staging);
  for (std::size_t i = 0; i < w.layers.size(); ++i) {
    upload.into(d.memory[i]);
    each_part(w.layers[i], d.layers.emplace_back(), upload);
  }
  upload.into(d.memory.back());
  each_other_part(w, d, upload);
  if (w.tied) d.head = d.token_embd;
  upload.finish();
  return d;
}

}  // namespace ringlm::cuda

// A model: weights mapped from a GGUF file, and the backend that computes with them. Immutable after
// opening; any number of sessions, on any threads, share one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ringlm/config.h"

namespace ringlm {

struct ModelOptions {
  int n_threads = 0;            // 0: one per physical core that the process may use
  std::string backend = "cpu";  // "cpu", "cuda", or "reference": slow, plain, the oracle
  // Attention windows, where the file does not carry the model's own (Mistral v0.1): one for all layers, or
  // one per layer, 0 for none; empty leaves what the file says.
  std::vector<std::int32_t> windows = {};
  // How positions turn queries and keys, instead of what the file says; a base or original length of 0 stays
  // the file's. Layers that have angles of their own for their window keep them.
  std::optional<Rope> rope = {};
  // Whether the cpu backend brings the weights into the order of its kernels when the model opens. Without,
  // they stay in the mapped file: opening takes no time and the pages are shared with other processes, but
  // every step is slower.
  bool repack = true;
};

class Model {
 public:
  // Throws FileFormatError, UnsupportedModelError, InvalidArgument or DeviceError, or Error when the file
  // cannot be read.
  static std::shared_ptr<const Model> open(const std::filesystem::path& path,
                                           const ModelOptions& options = {});
  ~Model();

  const Config& config() const noexcept;
  std::span<const std::filesystem::path> paths() const noexcept;  // the file, or all shards
  std::size_t weight_bytes()
      const noexcept;  // of the bound tensors: packed in memory, or mapped from the file
  std::size_t packed_bytes() const noexcept;  // the former, also where it was switched off
  std::size_t shared_bytes()
      const noexcept;                    // taken besides: float32 copies of vectors, scratch of the threads
  std::size_t available_memory() const;  // that sessions can take: of the GPU, or of this process
  int n_threads() const noexcept;
  std::string backend() const;  // "reference", "cuda", or the instruction set: "generic", "avx2", "neon" ...

  struct Parts;  // for the rest of the library
  const Parts& parts() const noexcept { return *parts_; }

 private:
  explicit Model(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

}  // namespace ringlm

// A model's weights in device memory: matrices in the decode layout (pack.h), vectors as float32, one piece
// of memory for each layer and one for the rest.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/launch.h"
#include "cuda/runtime.h"
#include "model/weights.h"

namespace ringlm::cuda {

// As in model/weights.h. Matrices that a layer does not have have no rows; vectors, null.
struct DeviceNetwork {
  DeviceMatrix gate, up, down;
  const float *gate_bias, *up_bias, *down_bias;
};

struct DeviceLayer {
  const float* attn_norm;
  DeviceMatrix q, k, v;
  const float *q_bias, *k_bias, *v_bias;
  const float *q_norm, *k_norm;
  DeviceMatrix out;
  const float* out_bias;
  const float* attn_post_norm;
  const float* ffn_norm;
  DeviceNetwork ff;          // of layers without experts
  DeviceMatrix router;       // [n_expert, n_embd]
  DeviceNetwork experts;     // of each, with an expert_stride
  DeviceNetwork shared;      // the expert for every token
  DeviceMatrix shared_gate;  // [1, n_embd]
  const float* ffn_post_norm;
};

struct DeviceWeights {
  DeviceMatrix token_embd;
  std::vector<DeviceLayer> layers;
  const float* output_norm;
  DeviceMatrix head;  // token_embd's data where they are tied
  std::vector<DeviceMemory> memory;
  std::size_t nbytes = 0;  // of all of it
};

struct LoadOptions {
  // Bytes that go to the device at a time; twice as many of pinned memory. More where four rows need it.
  std::size_t staging_bytes = 8 << 20;
};

// Bytes of device memory that the weights will take, without what loading them needs. Throws
// UnsupportedModelError where a matrix has a type that pack() does not take.
std::size_t device_weight_bytes(const Weights& weights);

// Copies them to the device in use; the file's pages leave memory behind it. Throws OutOfMemory before
// anything is allocated where they do not fit, UnsupportedModelError as above, DeviceError. Keeps nothing
// of what it had allocated when it throws.
DeviceWeights load_weights(const Weights& weights, const LoadOptions& options = {});

}  // namespace ringlm::cuda

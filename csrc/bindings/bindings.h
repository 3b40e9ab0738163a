#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <utility>

#include "ringlm/error.h"
#include "ringlm/model.h"
#include "ringlm/sampler.h"

namespace ringlm::bindings {

// What Python holds: close() lets go of the model, open sessions keep it.
struct ModelHandle {
  std::shared_ptr<const Model> model;

  std::shared_ptr<const Model> get() const;  // throws StateError when closed
};

// A sampler whose calls run without the GIL; a second thread gets an error instead of a race.
class PySampler {
 public:
  PySampler(std::int32_t n_vocab, SamplerParams params) : sampler_(n_vocab, std::move(params)) {}
  explicit PySampler(Sampler sampler) : sampler_(std::move(sampler)) {}

  template <class F>
  auto exclusively(F f) {
    if (busy_.test_and_set(std::memory_order_acquire)) {
      throw StateError("this sampler is in use by another thread; give each stream of text its own");
    }
    struct Release {
      std::atomic_flag& flag;
      ~Release() { flag.clear(std::memory_order_release); }
    } const release{busy_};
    const pybind11::gil_scoped_release no_gil;
    return f(sampler_);
  }

  const Sampler& get() const { return sampler_; }

 private:
  std::atomic_flag busy_;
  Sampler sampler_;
};

void bind_errors(pybind11::module_& m);
void bind_gguf(pybind11::module_& m);
void bind_model(pybind11::module_& m);
void bind_sampler(pybind11::module_& m);
void bind_session(pybind11::module_& m);

}  // namespace ringlm::bindings

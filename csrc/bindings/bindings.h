#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "ringlm/error.h"
#include "ringlm/model.h"
#include "ringlm/sampler.h"

namespace ringlm::bindings {

// Asks for the GIL. Once the interpreter is being finalized CPython ends a thread that does so by
// pthread_exit, which in glibc unwinds the stack, and the first destructor on the way would abort the
// process. Such a thread is held here until the process ends, as CPython itself does from 3.14 on.
template <class F>
auto or_wait_for_exit(F ask) {
  try {
    return ask();
  } catch (...) {  // Python's functions throw nothing: this is the unwinding
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// For its lifetime the thread does not hold the GIL.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  ~NoGil() {
    or_wait_for_exit([this] { PyEval_RestoreThread(state_); });
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* state_;
};

// For its lifetime, within that of a NoGil, the thread holds the GIL again.
class Gil {
 public:
  Gil() : state_(or_wait_for_exit([] { return PyGILState_Ensure(); })) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

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
    const NoGil no_gil;
    return f(sampler_);
  }

  const Sampler& get() const { return sampler_; }

 private:
  std::atomic_flag busy_;
  Sampler sampler_;
};

// Makes a C++ exception the current Python one; what is no ringlm::Error goes on.
void set_python_error(const std::exception_ptr& error);

// Calls of operator new in this module since it was loaded, on all threads.
std::int64_t heap_allocations();

void bind_errors(pybind11::module_& m);
void bind_bandwidth(pybind11::module_& m);
void bind_gguf(pybind11::module_& m);
void bind_model(pybind11::module_& m);
void bind_sampler(pybind11::module_& m);
void bind_session(pybind11::module_& m);

}  // namespace ringlm::bindings

// For tests of what the host side does when the runtime fails.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "simt/runtime_api.h"

// A runtime that fails nowhere yet; nothing is kept when this goes.
struct Fresh {
  simt::Live before = simt::live();
  Fresh() { simt::reset_runtime(); }
  ~Fresh() {
    simt::reset_runtime();
    check_nothing_kept();
  }
  void check_nothing_kept() const {
    const simt::Live now = simt::live();
    CHECK(now.device_buffers == before.device_buffers);
    CHECK(now.pinned_buffers == before.pinned_buffers);
    CHECK(now.handles == before.handles);
  }
};

// What f, which has to throw an E, says.
template <class E, class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  FAIL("nothing was thrown");
  return "";
}

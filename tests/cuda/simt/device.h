// What the host side of csrc/cuda/port.h calls: one function per instruction, run by the current thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/site.h"

namespace simt {

// memory.cpp. `bytes` is 1, 2, 4, 8 or 16, and the address has to be a multiple of it.
void load_global(void* to, const void* from, int bytes, Site at);
void store_global(void* to, const void* from, int bytes, Site at);
void load_shared(void* to, const void* from, int bytes, Site at);
void store_shared(void* to, const void* from, int bytes, Site at);

// Both halves of an atomic, on global or shared memory; nothing runs between them.
void atomic_load(void* value, const void* from, int bytes, Site at);
void atomic_store(void* to, const void* value, int bytes);

// cp.async. The copy happens in the wait, never before: what reads it early reads what was there.
void copy_async(void* to, const void* from, int bytes, Site at);
void copy_async_commit();
void copy_async_wait(int in_flight);

void* dynamic_shared(const char* name);
void* static_shared(const void* tag, const char* name, std::size_t bytes, std::size_t align, Site at);

// T is an array type. The lambda stands for the place: every instance of a template has an array of its own.
template <class T, class Lambda>
T* static_shared(Lambda, const char* name, Site at = Site::current()) {
  static constexpr char tag = 0;
  constexpr std::size_t align = alignof(T) > 16 ? alignof(T) : 16;
  return static_cast<T*>(static_shared(&tag, name, sizeof(T), align, at));
}

// collectives.cpp
enum class Shuffle { kIndex, kXor, kUp, kDown };
std::uint64_t shuffle_bits(Shuffle how, std::uint32_t mask, std::uint64_t value, int operand, int width,
                           Site at);
std::uint32_t ballot(std::uint32_t mask, bool predicate, Site at);
void mma_m16n8(float (&c)[4], const std::uint32_t* a, int a_count, const std::uint32_t* b, int b_count,
               Site at);
std::uint32_t movmatrix_trans(std::uint32_t x, Site at);
void ldmatrix_x4(std::uint32_t (&d)[4], const void* row, bool trans, Site at);  // reads as load_shared does

template <class T>
T shuffle(Shuffle how, std::uint32_t mask, T value, int operand, int width, Site at) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle_bits(how, mask, bits, operand, width, at);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// arithmetic.cpp
float ex2_approx_ftz(float x);
int dp4a(int a, int b, int c);

}  // namespace simt

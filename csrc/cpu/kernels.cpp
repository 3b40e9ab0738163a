#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <bit>
#include <cstdlib>
#include <string>
#include <string_view>

#include "ringlm/error.h"

namespace ringlm::cpu {
namespace {

#if defined(__x86_64__)
// clang 14's __builtin_cpu_supports does not know all names.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }

bool has_avxvnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1u);
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// Tiles are state that the system has to be asked for, once in a process.
bool has_amx() {
  constexpr unsigned tile = 1u << 24, int8 = 1u << 25;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & tile) == 0 || (edx & int8) == 0) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#elif defined(__aarch64__)
#if defined(__linux__)
bool has_dotprod() { return ::getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool has_i8mm() { return has_dotprod() && ::getauxval(AT_HWCAP2) & HWCAP2_I8MM; }
#else
bool has_dotprod() { return false; }
bool has_i8mm() { return false; }
#endif
#endif

const Kernels& choose() {
  const std::vector<const Kernels*> sets = runnable_kernels();
  const char* wanted = std::getenv("RINGLM_ISA");
  if (!wanted || !*wanted) return *sets.front();
  std::string names;
  for (const Kernels* k : sets) {
    if (std::string_view(k->name) == wanted) return *k;
    names += (names.empty() ? "" : ", ") + std::string(k->name);
  }
  throw InvalidArgument("RINGLM_ISA is '" + std::string(wanted) + "'; this processor runs " + names);
}

}  // namespace

std::vector<const Kernels*> runnable_kernels() {
  std::vector<const Kernels*> sets;
#if defined(__x86_64__)
  if (has_amx()) sets.push_back(&kAmx);
  if (has_avx512()) sets.push_back(&kAvx512);
  if (has_avxvnni()) sets.push_back(&kAvxVnni);
  if (has_avx2()) sets.push_back(&kAvx2);
#endif
#if defined(__aarch64__)
  if (has_i8mm()) sets.push_back(&kI8mm);
  if (has_dotprod()) sets.push_back(&kDotprod);
  sets.push_back(&kNeon);
#else
  sets.push_back(&kGeneric);
#endif
  return sets;
}

std::vector<float> rotation_tables(const kv::Rotation& r) {
  constexpr std::uint32_t order = 16;  // kLanes
  std::vector<float> tables;
  for (std::int32_t i = 0; i < r.head_dim; ++i) tables.push_back(kv::rotation_sign(i));
  for (std::uint32_t i = 0; i < order; ++i) {
    for (std::uint32_t j = 0; j < order; ++j) tables.push_back(std::popcount(i & j) % 2 == 0 ? 1.0f : -1.0f);
  }
  if (!is_dense(r)) return tables;
  const kv::Rotation one{r.m * r.width, r.m, r.width};
  for (const auto turn : {kv::rotate, kv::rotate_back}) {
    for (std::int32_t j = 0; j < one.head_dim; ++j) {
      std::vector<float> column(static_cast<std::size_t>(one.head_dim));
      column[static_cast<std::size_t>(j)] = 1.0f;
      turn(one, column.data());
      for (std::int32_t i = 0; i < one.head_dim;
           ++i) {  // signs act before the transform, and behind its inverse
        const float sign = kv::rotation_sign(turn == kv::rotate ? j : i);
        tables.push_back(sign * column[static_cast<std::size_t>(i)]);
      }
    }
  }
  return tables;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace ringlm::cpu

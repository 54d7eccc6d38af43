#include "isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qwenrt {

extern const Isa kPortable;
#if defined(__x86_64__)
extern const Isa kAvx2, kAvx512, kAmx;
#endif

namespace {

#if defined(__x86_64__)

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

// Tiles are for those whom Linux gave leave to use them, a process at a time.
bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return has_avx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif

// Best first.
struct Choice {
  const Isa* isa;
  bool available;
};

const Choice* choices() {
  static const Choice list[] = {
#if defined(__x86_64__)
      {&kAmx, has_amx()},
      {&kAvx512, has_avx512()},
      {&kAvx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")},
#endif
      {&kPortable, true}};
  return list;
}

std::atomic<const Choice*> selected{nullptr};

const Choice* best() {
  const Choice* choice = choices();
  while (!choice->available) ++choice;
  return choice;
}

}  // namespace

const Isa& isa(int64_t head_dim) {
  const Choice* choice = selected.load(std::memory_order_relaxed);
  if (choice == nullptr) {
    choice = best();
    selected.store(choice, std::memory_order_relaxed);
  }
  // The portable kernels take every multiple of 4, so the search ends.
  while (!choice->available || head_dim % choice->isa->lanes != 0) ++choice;
  return *choice->isa;
}

bool select_isa(const char* name) {
  if (name == nullptr) {
    selected.store(best(), std::memory_order_relaxed);
    return true;
  }
  const Choice* choice = choices();
  while (choice->isa != &kPortable && std::strcmp(choice->isa->name, name) != 0) ++choice;
  if (!choice->available || std::strcmp(choice->isa->name, name) != 0) return false;
  selected.store(choice, std::memory_order_relaxed);
  return true;
}

}  // namespace qwenrt

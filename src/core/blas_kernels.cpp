#include "core/blas_kernels.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

namespace headroom {
namespace {

// What this CPU can run, in OpenBLAS's words; empty where nothing better than its fallback is
// known.
std::string best_core() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd")) {
    return "SkylakeX";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
#endif
  return {};
}

std::string choose() {
  using Name = const char* (*)();
  using Call = void (*)();
  const auto core_name = reinterpret_cast<Name>(dlsym(RTLD_DEFAULT, "openblas_get_corename"));
  if (core_name == nullptr) return {};
  const auto quit = reinterpret_cast<Call>(dlsym(RTLD_DEFAULT, "gotoblas_dynamic_quit"));
  const auto init = reinterpret_cast<Call>(dlsym(RTLD_DEFAULT, "gotoblas_dynamic_init"));
  const std::string better = better_core(core_name());
  if (!better.empty() && quit != nullptr && init != nullptr) {
    setenv("OPENBLAS_CORETYPE", better.c_str(), 1);
    quit();
    init();
    unsetenv("OPENBLAS_CORETYPE");  // a program that we start decides for itself
  }
  return core_name();
}

// While the program is loaded, because no other thread may be inside BLAS when its kernels are
// exchanged.
const std::string kCore = choose();

}  // namespace

bool may_tune_libraries() {
  const char* choice = std::getenv("HEADROOM_TUNE_LIBRARIES");
  return choice == nullptr || std::string(choice) != "0";
}

std::string better_core(const std::string& core) {
  const bool is_fallback = core == "Prescott";
  const bool may_exchange = may_tune_libraries() && std::getenv("OPENBLAS_CORETYPE") == nullptr;
  return is_fallback && may_exchange ? best_core() : std::string();
}

const std::string& blas_core() { return kCore; }

}  // namespace headroom

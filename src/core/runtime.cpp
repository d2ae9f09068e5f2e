#include <headroom/core/runtime.h>

#include <headroom/core/error.h>
#include <headroom/core/version.h>
#include "core/blas_kernels.h"
#include "core/cpu_quota.h"
#include "core/library_buffers.h"
#include "core/thread_waiting.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <dlfcn.h>
#include <sys/resource.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <string>

namespace headroom {
namespace {

int threads_from_environment() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  return text == nullptr ? 0 : std::atoi(text);
}

struct ThreadCount {
  int count = 1;
  std::string reason;
};

ThreadCount choose_threads(int requested, int num_processes) {
  if (requested > 0) return {requested, "as asked for"};
  if (const int threads = threads_from_environment(); threads > 0)
    return {threads, fmt::format("OMP_NUM_THREADS={}", threads)};
  ThreadCount chosen{num_allowed_cores(), ""};
  chosen.reason = fmt::format("{} cores that this process may run on", chosen.count);
  if (const auto quota = cpu_quota(); quota && threads_of(*quota) < chosen.count) {
    chosen = {threads_of(*quota),
              fmt::format("a quota of {:.4g} CPUs in {}", quota->num_cpus, quota->file)};
  }
  if (num_processes > 1) {
    chosen.count = std::max(1, chosen.count / num_processes);
    chosen.reason += fmt::format(", shared by {} processes", num_processes);
  }
  return chosen;
}

bool has_limited_addresses() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
}

// LibTorch's number of threads is one per process, and so is the reason for it.
std::string& reason_for_threads() {
  static std::string reason = "LibTorch's default";
  return reason;
}

struct Blas {
  std::string name = "unknown";
  bool is_openmp = false;
};

// Asked by symbol, because which library answers is decided when the process is loaded, not when it
// is linked.
Blas loaded_blas() {
  using GetParallel = int (*)();
  using GetConfig = const char* (*)();
  const auto get_parallel =
      reinterpret_cast<GetParallel>(dlsym(RTLD_DEFAULT, "openblas_get_parallel"));
  const auto get_config = reinterpret_cast<GetConfig>(dlsym(RTLD_DEFAULT, "openblas_get_config"));
  if (get_parallel == nullptr || get_config == nullptr) return {};
  const char* const flavours[] = {"sequential", "pthreads", "OpenMP"};
  const int flavour = get_parallel();
  const std::string config = get_config();
  const std::string version = config.substr(0, config.find(' ', config.find(' ') + 1));
  return {fmt::format("{} ({}, {})", version,
                      flavour >= 0 && flavour <= 2 ? flavours[flavour] : "?", blas_core()),
          flavour == 2};
}

std::string cpu_features() {
  std::string features;
  const auto add = [&](bool present, const char* name) {
    if (present) features += features.empty() ? name : std::string(" ") + name;
  };
#if defined(__x86_64__)
  add(__builtin_cpu_supports("avx2"), "AVX2");
  add(__builtin_cpu_supports("avx512f"), "AVX-512");
#endif
  const HalfInstructions half = half_instructions();
  add(half.avx512_bf16, "AVX512-BF16");
  add(half.avx512_fp16, "AVX512-FP16");
  add(half.amx_bf16, "AMX-BF16");
  return features;
}

#if defined(__x86_64__)
// Linux saves the tiles of a process only after it has asked for that; without it the first tile
// instruction ends the program.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

HalfInstructions ask_processor() {
  HalfInstructions half;
  if (!__builtin_cpu_supports("avx512f"))
    return half;  // the CPU has it, and the system saves its registers
  half.avx512_bf16 = __builtin_cpu_supports("avx512bf16");
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return half;
  half.avx512_fp16 = (edx >> 23 & 1U) != 0;
  half.amx_bf16 = (edx >> 22 & 1U) != 0 && (edx >> 24 & 1U) != 0 && may_use_tiles();
  return half;
}
#else
HalfInstructions ask_processor() { return {}; }
#endif

}  // namespace

void configure_threads(int requested, int num_processes) {
  if (requested < 0)
    throw ConfigError(
        fmt::format("--num_threads {} is negative; give 1 or more, or 0 for all cores", requested));
  const ThreadCount threads = choose_threads(requested, num_processes);
  at::set_num_threads(threads.count);
  reason_for_threads() = threads.reason;
  adapt_thread_waiting(threads.count);
  if (has_limited_addresses()) make_library_buffers();  // before tensors take the rest
}

RuntimeInfo runtime_info() {
  RuntimeInfo info;
  info.headroom_version = kVersion;
  info.libtorch_version = TORCH_VERSION;
  const Blas blas = loaded_blas();
  info.blas = blas.name;
  info.blas_is_openmp = blas.is_openmp;
  info.num_threads = at::get_num_threads();
  info.num_threads_reason = reason_for_threads();
  info.thread_waiting = thread_waiting();
  info.num_cores = num_allowed_cores();
  if (const auto quota = cpu_quota()) info.cpu_quota = quota->num_cpus;
  info.cpu_features = cpu_features();
  info.has_cuda = at::hasCUDA();
  if (!info.blas_is_openmp) {
    info.warnings.push_back(
        fmt::format("the BLAS in use is {}, not OpenBLAS with OpenMP: a step can be 2-3x slower; "
                    "install libopenblas0-openmp and rebuild",
                    info.blas));
  }
  if (info.num_threads > info.num_cores) {
    info.warnings.push_back(
        fmt::format("{} threads on {} cores: threads will wait for each other; set OMP_NUM_THREADS "
                    "or --num_threads to {}",
                    info.num_threads, info.num_cores, info.num_cores));
  }
  return info;
}

HalfInstructions half_instructions() {
  static const HalfInstructions half = ask_processor();
  return half;
}

}  // namespace headroom

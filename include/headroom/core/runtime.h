#pragma once

#include <optional>
#include <string>
#include <vector>

namespace headroom {

// A program that links this library changes two things while it is loaded, before main(): an
// OpenBLAS that does not know the CPU is told the kernels that the CPU can run, and the environment
// variable ONEDNN_MAX_CPU_ISA is set to AVX512_CORE_BF16 where it is not set, because oneDNN's
// products with AMX end the program in some versions. OPENBLAS_CORETYPE and ONEDNN_MAX_CPU_ISA in
// the environment decide instead; HEADROOM_TUNE_LIBRARIES=0 switches both off.

/// What the process runs on, as `headroom info` shows it.
struct RuntimeInfo {
  std::string headroom_version;
  std::string libtorch_version;
  std::string
      blas;  ///< e.g. "OpenBLAS 0.3.21 (OpenMP, Haswell)"; "unknown" when it is not OpenBLAS
  bool blas_is_openmp = false;
  int num_threads = 0;              ///< what LibTorch uses now
  std::string num_threads_reason;   ///< why that many, e.g. "OMP_NUM_THREADS=2"
  std::string thread_waiting;       ///< what decides how threads wait for each other
  int num_cores = 0;                ///< cores that this process may run on (CPU affinity)
  std::optional<double> cpu_quota;  ///< CPUs that its control group may use, where that is limited
  std::string
      cpu_features;  ///< vector extensions that matter here, e.g. "AVX2 AVX-512 AVX512-BF16"
  bool has_cuda = false;
  std::vector<std::string> warnings;  ///< what is wrong, each with its remedy
};

/// Sets LibTorch's threads: `requested` when positive, otherwise OMP_NUM_THREADS when set,
/// otherwise the cores that this process may run on or the CPU quota of its control group,
/// whichever is less, which it shares evenly with the others of `num_processes`. Throws ConfigError
/// for a negative number.
///
/// From the first call on, a thread of the library watches whether other work wants the same cores.
/// Where it does, OpenMP's threads sleep while they wait for each other (on free cores spinning is
/// faster), and where it wants half of them, the threads of the process run on the others until it
/// has gone; threads that were pinned stay. OMP_WAIT_POLICY or GOMP_SPINCOUNT in the environment
/// switches that off. It works with GNU's OpenMP runtime, changes no number, and ends with the
/// process.
void configure_threads(int requested, int num_processes = 1);

/// Reads the facts; changes nothing.
RuntimeInfo runtime_info();

/// Silences what is said on standard error for people; warnings stay.
void set_log_quiet(bool quiet);

/// Instructions for products in half precision that this process may run: the CPU has them, and the
/// system saves their registers.
struct HalfInstructions {
  bool avx512_bf16 = false;
  bool amx_bf16 = false;  ///< asking sets the process's permission for AMX's tiles, which Linux
                          ///< gives on request
  bool avx512_fp16 = false;
};
HalfInstructions half_instructions();

}  // namespace headroom

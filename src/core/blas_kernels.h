#pragma once

#include <string>

namespace headroom {

/// The kind of CPU whose kernels OpenBLAS uses, e.g. "Haswell" or "SkylakeX"; empty when the BLAS
/// is another one. An OpenBLAS that is older than the CPU does not know its model and falls back to
/// SSE3 ("Prescott"), four to five times slower on a CPU with AVX-512. A program that links this
/// function asks OpenBLAS at start for the kernels that the CPU can run, unless the environment
/// variable OPENBLAS_CORETYPE decides.
const std::string& blas_core();

/// What OpenBLAS is asked for where it has chosen the kernels of `core`; empty: it keeps them.
std::string better_core(const std::string& core);

/// Whether the libraries below may be set up while the program is loaded: false where the
/// environment has HEADROOM_TUNE_LIBRARIES=0.
bool may_tune_libraries();

}  // namespace headroom

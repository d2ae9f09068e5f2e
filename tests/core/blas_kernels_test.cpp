#include "core/blas_kernels.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace headroom {
namespace {

TEST(BlasKernels, AreNotTheFallbackOfAnUnknownCpu) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && std::getenv("OPENBLAS_CORETYPE") == nullptr) {
    EXPECT_NE(blas_core(), "Prescott");
  }
#endif
}

TEST(BlasKernels, LeaveTheEnvironmentToChildren) {
  const char* before = std::getenv("OPENBLAS_CORETYPE");
  blas_core();
  EXPECT_EQ(std::getenv("OPENBLAS_CORETYPE"), before);
}

}  // namespace
}  // namespace headroom

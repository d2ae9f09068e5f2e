#include "core/blas_kernels.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace headroom {
namespace {

/// A variable of the environment, which has its value of before again at the end.
class Variable {
 public:
  explicit Variable(const char* name) : name_(name) {
    if (const char* text = std::getenv(name)) before_ = text;
  }
  ~Variable() { set(before_ ? before_->c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

  void set(const char* value) const {
    value == nullptr ? ::unsetenv(name_) : ::setenv(name_, value, 1);
  }

 private:
  const char* name_;
  std::optional<std::string> before_;
};

TEST(BlasKernels, AreNotTheFallbackOfAnUnknownCpu) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && std::getenv("OPENBLAS_CORETYPE") == nullptr) {
    EXPECT_NE(blas_core(), "Prescott");
  }
#endif
}

TEST(BlasKernels, AreExchangedForTheFallbackAloneAndUnlessTheEnvironmentDecides) {
  const Variable core_type("OPENBLAS_CORETYPE"), tuning("HEADROOM_TUNE_LIBRARIES");
  core_type.set(nullptr);
  tuning.set(nullptr);
  EXPECT_EQ(better_core("Zen"), "");
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    EXPECT_NE(better_core("Prescott"), "");
  }
#endif
  tuning.set("0");
  EXPECT_EQ(better_core("Prescott"), "");
  tuning.set("1");
  core_type.set("Prescott");
  EXPECT_EQ(better_core("Prescott"), "");
}

TEST(BlasKernels, LeaveTheEnvironmentToChildren) {
  const char* before = std::getenv("OPENBLAS_CORETYPE");
  blas_core();
  EXPECT_EQ(std::getenv("OPENBLAS_CORETYPE"), before);
}

}  // namespace
}  // namespace headroom

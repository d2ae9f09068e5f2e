#include <headroom/execute/autocast.h>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <headroom/core/error.h>
#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>
#include "core/torch_compat.h"

namespace headroom {
namespace {

at::ScalarType type_of_a_product() {
  const at::Tensor a = torch::ones({4, 4});
  return torch::mm(a, a).scalar_type();
}

TEST(Autocast, HoldsWhileTheScopeLivesAndNests) {
  EXPECT_EQ(type_of_a_product(), torch::kFloat);
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    EXPECT_EQ(type_of_a_product(), torch::kBFloat16);
    {
      const Autocast full(torch::kCPU, torch::kBFloat16, /*enabled=*/false);
      EXPECT_EQ(type_of_a_product(), torch::kFloat);
    }
    EXPECT_EQ(type_of_a_product(), torch::kBFloat16);
  }
  EXPECT_EQ(type_of_a_product(), torch::kFloat);
}

TEST(Autocast, RestoresTheTypeAndTheStateAfterAnException) {
  const at::ScalarType before = HEADROOM_AUTOCAST_CUDA_DTYPE();
  try {
    const Autocast autocast(torch::kCUDA, torch::kBFloat16);
    EXPECT_TRUE(HEADROOM_AUTOCAST_CUDA_ENABLED());
    EXPECT_EQ(HEADROOM_AUTOCAST_CUDA_DTYPE(), torch::kBFloat16);
    throw std::runtime_error("in the forward");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(HEADROOM_AUTOCAST_CUDA_ENABLED());
  EXPECT_EQ(HEADROOM_AUTOCAST_CUDA_DTYPE(), before);
}

TEST(Autocast, UsesTheWeightsAsTheyAreAfterAnUpdate) {
  const at::Tensor weight = torch::ones({4, 4}, torch::requires_grad());
  const at::Tensor x = torch::ones({4, 4});
  const auto forward = [&]() {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    return torch::mm(x, weight).to(torch::kFloat)[0][0].item<float>();
  };
  EXPECT_EQ(forward(), 4.0f);
  {
    torch::NoGradGuard no_grad;
    weight.data().fill_(2.0);  // behind autograd's back, as one-pass optimizers write
  }
  EXPECT_EQ(forward(), 8.0f);
}

TEST(Autocast, GradientsOfWeightsAreFp32) {
  const at::Tensor weight = torch::randn({4, 4}, torch::requires_grad());
  at::Tensor loss;
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    loss = torch::mm(torch::ones({2, 4}), weight).to(torch::kFloat).sum();
  }
  loss.backward();
  EXPECT_EQ(weight.grad().scalar_type(), torch::kFloat);
}

TEST(Autocast, RefusesTypesAndDevicesThatItDoesNotHave) {
  EXPECT_THROW(Autocast(torch::kCPU, torch::kHalf), ConfigError);
  EXPECT_THROW(Autocast(torch::kCUDA, torch::kFloat), ConfigError);
  EXPECT_THROW(Autocast(torch::kMeta, torch::kBFloat16), ConfigError);
  EXPECT_EQ(type_of_a_product(), torch::kFloat);
}

TEST(ChooseHalfPrecision, AsksTheProcessor) {
  MemoryMeter& meter = MemoryMeter::instance();
  const std::int64_t live = meter.live_bytes();
  meter.set_cap(live + 1);  // the trial of a product does not depend on the budget
  const HalfPrecision bf16 = choose_half_precision(torch::kCPU, torch::kBFloat16);
  EXPECT_EQ(meter.cap(), live + 1);
  meter.set_cap(0);
  EXPECT_EQ(meter.live_bytes(), live);
  const HalfInstructions cpu = half_instructions();
  const bool has_instructions = cpu.avx512_bf16 || cpu.amx_bf16;
  EXPECT_TRUE(has_instructions || !bf16.autocast) << bf16.reason;
  EXPECT_EQ(bf16.autocast, bf16.reason.find("computing in bf16") != std::string::npos)
      << bf16.reason;
  EXPECT_EQ(choose_half_precision(torch::kCPU, torch::kBFloat16).reason, bf16.reason)
      << "one decision for the whole process";
  EXPECT_FALSE(choose_half_precision(torch::kCPU, torch::kHalf).autocast);
  EXPECT_TRUE(choose_half_precision(torch::Device("cuda:0"), torch::kHalf).autocast);
  EXPECT_NE(bf16.reason.find("bf16"), std::string::npos);
}

// What is set while a program is loaded can be seen in another one alone.
TEST(LibraryTuningChild, DISABLED_Prints) {
  const char* isa = std::getenv("ONEDNN_MAX_CPU_ISA");
  std::printf("tuning isa=%s\n", isa == nullptr ? "none" : isa);
}

TEST(LibraryTuning, TheEnvironmentDecidesAndSwitchesItOff) {
  const auto isa_under = [](const std::string& variables) {
    const std::string command =
        "env -u ONEDNN_MAX_CPU_ISA -u HEADROOM_TUNE_LIBRARIES " + variables + " /proc/" +
        std::to_string(::getpid()) +
        "/exe --gtest_also_run_disabled_tests --gtest_filter=LibraryTuningChild.DISABLED_Prints";
    FILE* child = ::popen(command.c_str(), "r");
    std::string output;
    for (char line[512]; child != nullptr && std::fgets(line, sizeof line, child) != nullptr;)
      output += line;
    EXPECT_EQ(child == nullptr ? -1 : ::pclose(child), 0);
    const std::size_t begin = output.find("isa=");
    if (begin == std::string::npos) return output;
    return output.substr(begin + 4, output.find('\n', begin) - begin - 4);
  };
  EXPECT_EQ(isa_under(""), "AVX512_CORE_BF16");
  EXPECT_EQ(isa_under("ONEDNN_MAX_CPU_ISA=AVX2"), "AVX2");
  EXPECT_EQ(isa_under("HEADROOM_TUNE_LIBRARIES=0"), "none");
  EXPECT_EQ(isa_under("HEADROOM_TUNE_LIBRARIES=1"), "AVX512_CORE_BF16");
}

}  // namespace
}  // namespace headroom

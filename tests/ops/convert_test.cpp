#include "ops/convert.h"

#include <headroom/core/error.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace headroom {
namespace {

using torch::Tensor;

// Floats of every size: all 16-bit patterns above random lower halves, ties, the edges of fp16,
// infinities and NaN.
Tensor many_floats() {
  torch::manual_seed(1);
  const Tensor high = torch::arange(65536, torch::kInt) * 65536;
  const Tensor bits = torch::cat(
      {high, high + 0x8000, high + 0x7FFF, high + torch::randint(0, 65536, {65536}, torch::kInt),
       torch::randint(0x38000000, 0x47900000, {200000}, torch::kInt) & ~0xFFF});
  Tensor floats = torch::empty({bits.numel()});
  std::memcpy(floats.data_ptr(), bits.data_ptr(), static_cast<std::size_t>(bits.numel()) * 4);
  return floats;
}

void expect_same(const Tensor& actual, const Tensor& expected) {
  EXPECT_TRUE(torch::equal(actual.isnan(), expected.isnan()));
  const Tensor a = actual.to(torch::kFloat).nan_to_num(0, 1e38, -1e38),
               e = expected.to(torch::kFloat).nan_to_num(0, 1e38, -1e38);
  EXPECT_TRUE(torch::equal(a, e));
}

TEST(Convert, RoundsAsLibTorchDoes) {
  const Tensor x = many_floats();
  for (const auto type : {torch::kBFloat16, torch::kHalf}) {
    const Tensor converted = convert(x, type);
    ASSERT_EQ(converted.scalar_type(), type);
    expect_same(converted, x.to(type));
    expect_same(convert(converted, torch::kFloat), converted.to(torch::kFloat));
  }
}

TEST(Convert, TakesEverySixteenBitPattern) {
  Tensor bits = torch::arange(65536, torch::kInt).to(torch::kShort);
  for (const auto type : {torch::kBFloat16, torch::kHalf})
    expect_same(convert(bits.view(type), torch::kFloat), bits.view(type).to(torch::kFloat));
}

TEST(Convert, KeepsStrides) {
  const Tensor x = torch::randn({5, 7, 3}).permute({2, 0, 1});
  const Tensor y = convert(x, torch::kBFloat16);
  EXPECT_EQ(y.strides(), x.strides());
  EXPECT_TRUE(torch::equal(y, x.to(torch::kBFloat16)));
  EXPECT_TRUE(
      torch::equal(convert(x.slice(2, 0, 4), torch::kHalf), x.slice(2, 0, 4).to(torch::kHalf)));
}

TEST(Convert, TakesOtherTypesTheSlowWay) {
  const Tensor x = torch::randn({9});
  EXPECT_TRUE(torch::equal(convert(x, torch::kDouble), x.to(torch::kDouble)));
  EXPECT_EQ(convert(torch::empty({0}), torch::kHalf).numel(), 0);
}

TEST(Convert, RefusesTwoSizes) {
  Tensor out = torch::empty({3});
  EXPECT_THROW(convert_out(torch::randn({4}), out), ConfigError);
}

TEST(RoundTo, IsThereAndBackAgain) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = torch::randn({3, 70001}) * 100;
    const at::Tensor rounded = x.clone();
    round_to(rounded, type);
    EXPECT_TRUE(torch::equal(rounded, x.to(type).to(torch::kFloat)));
    EXPECT_FALSE(torch::equal(rounded, x));
    EXPECT_THROW(round_to(x.t(), type), ConfigError);
  }
}

TEST(KeptTypeScope, Nests) {
  EXPECT_FALSE(kept_type());
  const KeptTypeScope outer(at::kHalf);
  {
    const KeptTypeScope none(std::nullopt);
    EXPECT_FALSE(kept_type());
  }
  EXPECT_EQ(kept_type(), at::kHalf);
}

}  // namespace
}  // namespace headroom

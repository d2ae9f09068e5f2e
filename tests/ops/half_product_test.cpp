// Products of bf16 matrices against the same products in double, within what rounding allows.
#include "ops/half_product.h"
#include "ops/half_product_in_float.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

using Product = void (*)(const at::Tensor&, const at::Tensor&, const at::Tensor&, double);

struct ProductSizes {
  std::int64_t m, k, n;
};

// A (rows, columns) matrix of bf16 numbers: dense, transposed, or with rows further apart.
at::Tensor matrix(std::int64_t rows, std::int64_t columns, int form) {
  if (form == 1) return torch::randn({columns, rows}).to(torch::kBFloat16).t();
  if (form == 2)
    return torch::randn({rows, 2 * columns}).to(torch::kBFloat16).narrow(1, 0, columns);
  return torch::randn({rows, columns}).to(torch::kBFloat16);
}

// Sums of k terms in fp32 err by at most about k units in the last place of the sum of absolute
// values; a result in bf16 is rounded to 8 bits besides.
void expect_within_rounding(Product product, const ProductSizes& sizes, int form_a, int form_b,
                            at::ScalarType type, double beta) {
  const at::Tensor a = matrix(sizes.m, sizes.k, form_a), b = matrix(sizes.k, sizes.n, form_b);
  const at::Tensor c = torch::randn({sizes.m, sizes.n}).to(type);
  const at::Tensor before = c.to(torch::kDouble);
  product(a, b, c, beta);
  const at::Tensor left = a.to(torch::kDouble), right = b.to(torch::kDouble);
  const at::Tensor exact = beta * before + left.mm(right);
  const at::Tensor magnitude = beta * before.abs() + left.abs().mm(right.abs());
  at::Tensor allowed = magnitude * (static_cast<double>(sizes.k + 2) / (1 << 24));
  if (type == torch::kBFloat16) allowed = allowed + (exact.abs() + allowed) / 256.0;
  EXPECT_LE(((c.to(torch::kDouble) - exact).abs() - allowed).max().item<double>(), 0.0)
      << sizes.m << " x " << sizes.k << " x " << sizes.n << ", forms " << form_a << " and "
      << form_b << ", beta " << beta;
}

void expect_all_forms(Product product) {
  torch::manual_seed(1);
  for (const ProductSizes& sizes : {ProductSizes{1, 1, 1}, ProductSizes{3, 17, 5},
                                    ProductSizes{64, 96, 33}, ProductSizes{130, 768, 70}}) {
    for (int form_a = 0; form_a < 3; ++form_a) {
      for (int form_b = 0; form_b < 3; ++form_b) {
        for (const double beta : {0.0, 1.0}) {
          expect_within_rounding(product, sizes, form_a, form_b, torch::kFloat, beta);
          expect_within_rounding(product, sizes, form_a, form_b, torch::kBFloat16, beta);
        }
      }
    }
  }
}

TEST(HalfProduct, IsExactButForRounding) {
  RecordProperty("uses_instructions_for_bf16", ops::has_fast_half_products() ? "yes" : "no");
  expect_all_forms(ops::half_product);
}

TEST(HalfProduct, IsExactButForRoundingWhereItIsComputedInFloat) {
  expect_all_forms(ops::half_product_in_float);
}

TEST(HalfProduct, TakesEmptyMatrices) {
  const at::Tensor c = torch::ones({2, 3});
  ops::half_product(matrix(2, 0, 0), matrix(0, 3, 0), c, 1.0);
  EXPECT_TRUE(torch::equal(c, torch::ones({2, 3})));
  ops::half_product(matrix(2, 0, 0), matrix(0, 3, 0), c, 0.0);
  EXPECT_TRUE(torch::equal(c, torch::zeros({2, 3})));
  ops::half_product(matrix(0, 4, 0), matrix(4, 3, 0), torch::empty({0, 3}), 0.0);
}

}  // namespace
}  // namespace headroom

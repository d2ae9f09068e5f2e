#include "core/figures.h"

#include <gtest/gtest.h>

#include <limits>

namespace headroom {
namespace {

TEST(FormatFigure, ShowsThreeSignificantDigits) {
  EXPECT_EQ(format_figure(0.0), "0");
  EXPECT_EQ(format_figure(0.0123456), "0.0123");
  EXPECT_EQ(format_figure(0.4), "0.400") << "a slow run is not 0 samples/s";
  EXPECT_EQ(format_figure(1.0), "1.00");
  EXPECT_EQ(format_figure(9.996), "10.0");
  EXPECT_EQ(format_figure(12.345), "12.3");
  EXPECT_EQ(format_figure(99.96), "100");
  EXPECT_EQ(format_figure(123.4), "123");
  EXPECT_EQ(format_figure(123456.7), "123457");
  EXPECT_EQ(format_figure(-0.5), "-0.500");
  EXPECT_EQ(format_figure(1e-9), "1e-09");
  EXPECT_EQ(format_figure(1e12), "1e+12");
  EXPECT_EQ(format_figure(std::numeric_limits<double>::infinity()), "inf");
}

TEST(FormatLoss, ShowsFourDigitsAndNoFewerThanThreeSignificantOnes) {
  EXPECT_EQ(format_loss(2.30258), "2.3026");
  EXPECT_EQ(format_loss(123.4), "123.4000");
  EXPECT_EQ(format_loss(0.1), "0.1000");
  EXPECT_EQ(format_loss(0.0123456), "0.0123");
  EXPECT_EQ(format_loss(0.000123456), "0.000123") << "a small loss is not 0.0001";
  EXPECT_EQ(format_loss(0.0), "0");
  EXPECT_EQ(format_loss(1e12), "1e+12");
  EXPECT_EQ(format_loss(std::numeric_limits<double>::quiet_NaN()), "nan");
}

}  // namespace
}  // namespace headroom

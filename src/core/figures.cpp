#include "core/figures.h"

#include <fmt/format.h>

#include <cmath>

namespace headroom {

std::string format_figure(double value) {
  const double size = std::fabs(value);
  if (value == 0.0) return "0";
  if (!std::isfinite(value) || size < 1e-4 || size >= 1e9) return fmt::format("{:.3g}", value);
  if (size >= 99.95) return fmt::format("{:.0f}", value);
  // Digits after the point that make three significant ones, after rounding.
  int digits = 2 - static_cast<int>(std::floor(std::log10(size)));
  if (std::round(size * std::pow(10.0, digits)) >= 1000.0) --digits;
  return fmt::format("{:.{}f}", value, digits);
}

std::string format_loss(double value) {
  const double size = std::fabs(value);
  return size >= 0.1 && size < 1e9 ? fmt::format("{:.4f}", value) : format_figure(value);
}

}  // namespace headroom

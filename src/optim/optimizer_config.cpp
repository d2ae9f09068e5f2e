#include <headroom/optim/optimizer_config.h>

#include <fmt/format.h>

#include <functional>
#include <numeric>

#include <headroom/core/error.h>
#include "optim/quantized_kernels.h"

namespace headroom {
namespace {

using Shape = std::vector<std::int64_t>;
constexpr std::int64_t kFloatBytes = 4;

std::int64_t num_elements(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::int64_t adafactor_bytes(const Shape& shape) {
  const std::int64_t n = num_elements(shape);
  if (shape.size() < 2 || n == 0) return n * kFloatBytes;
  return (shape[0] + n / shape[0]) * kFloatBytes;
}

std::int64_t adamw_8bit_bytes(std::int64_t n) {
  if (n < kMin8bitSize) return 2 * n * kFloatBytes;
  return 2 * n + 2 * kFloatBytes * optim_kernels::num_blocks(n);
}

}  // namespace

const std::vector<std::string>& optimizer_names() {
  static const std::vector<std::string> names = {"sgd", "adam", "adamw", "adafactor", "adamw_8bit"};
  return names;
}

std::int64_t optimizer_state_bytes(const OptimizerConfig& config,
                                   const std::vector<Shape>& shapes) {
  std::function<std::int64_t(const Shape&)> bytes_of;
  if (config.name == "sgd") {
    bytes_of = [&config](const Shape& shape) {
      return config.momentum != 0 ? kFloatBytes * num_elements(shape) : 0;
    };
  } else if (config.name == "adam" || config.name == "adamw") {
    bytes_of = [](const Shape& shape) { return 2 * kFloatBytes * num_elements(shape); };
  } else if (config.name == "adafactor") {
    bytes_of = adafactor_bytes;
  } else if (config.name == "adamw_8bit") {
    bytes_of = [](const Shape& shape) { return adamw_8bit_bytes(num_elements(shape)); };
  } else {
    throw ConfigError(fmt::format("unknown optimizer \"{}\": choose one of {}", config.name,
                                  fmt::join(optimizer_names(), ", ")));
  }
  std::int64_t total = 0;
  for (const Shape& shape : shapes) total += bytes_of(shape);
  return total;
}

}  // namespace headroom

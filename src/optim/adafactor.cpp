#include "optim/adafactor.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include <headroom/core/error.h>
#include "optim/adafactor_kernels.h"
#include "optim/dense_floats.h"
#include "optim/options_as.h"
#include "optim/parameter_groups.h"
#include "optim/zeroed_state.h"

namespace headroom {
namespace {

using optim_kernels::AdafactorStep;
using optim_kernels::FactoredMoment;
using optim_kernels::Tile;

// Sums are made over a fixed number of chunks of rows and then added in order, so that they do not
// depend on the number of threads.
constexpr std::int64_t kNumChunks = 16;
constexpr std::int64_t kTileColumns = 8192;  // column sums of all chunks: half a MiB
constexpr std::int64_t kRowsAtOnce = 256;

bool is_factored(const at::Tensor& parameter) {
  return parameter.dim() >= 2 && parameter.numel() > 0;
}

/// Calls body(chunk, begin, end) for each chunk of 0..count, on all threads if there is enough to
/// do.
template <typename Body>
void for_chunks(std::int64_t count, std::int64_t elements, const Body& body) {
  const std::int64_t length = (count + kNumChunks - 1) / kNumChunks;
  const std::int64_t grain = elements < kElementsPerTask ? kNumChunks : 1;
  parallel_for(0, kNumChunks, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t begin = std::min(chunk * length, count);
      body(chunk, begin, std::min(begin + length, count));
    }
  });
}

double sum_over_chunks(std::int64_t count, std::int64_t elements,
                       const std::function<double(std::int64_t, std::int64_t)>& sum_of) {
  std::array<double, kNumChunks> sums{};
  for_chunks(count, elements, [&](std::int64_t chunk, std::int64_t begin, std::int64_t end) {
    sums[static_cast<std::size_t>(chunk)] = sum_of(begin, end);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

double root_mean(double sum, std::int64_t count) {
  return std::sqrt(sum / static_cast<double>(count));
}

/// The numbers of one update.
struct Numbers {
  double beta2;
  double rate;  // the size of the step, with all its factors but clipping
  AdafactorStep step(const AdafactorOptions& options, double update_rms) const {
    return {static_cast<float>(options.weight_decay() * rate),
            static_cast<float>(rate / std::max(1.0, update_rms / options.clip_threshold())),
            static_cast<float>(options.beta1())};
  }
};

Numbers numbers_of(const AdafactorOptions& options, std::int64_t step, double parameter_rms) {
  const auto t = static_cast<double>(step);
  double rate = options.lr();
  if (options.relative_step())
    rate = std::min(options.warmup_init() ? 1e-6 * t : 1e-2, 1 / std::sqrt(t));
  if (options.scale_parameter()) rate *= std::max(std::get<1>(options.eps()), parameter_rms);
  return {1 - std::pow(t, options.decay_rate()), rate};
}

/// A parameter seen as a matrix, with its state.
struct Matrix {
  std::int64_t rows;
  std::int64_t columns;
  float* parameter;
  const float* gradient;
  float* exp_avg;  // or null
  float* row_moments;
  float* column_moments;
  std::int64_t elements() const { return rows * columns; }
};

void move_row_moments(const float* square_sums, std::int64_t count, std::int64_t columns,
                      double kept, double added, double eps, float* moments) {
  for (std::int64_t i = 0; i < count; ++i) {
    const double mean_square =
        static_cast<double>(square_sums[i]) / static_cast<double>(columns) + eps;
    moments[i] = static_cast<float>(kept * static_cast<double>(moments[i]) + added * mean_square);
  }
}

/// Moves the second moments of rows and columns towards the mean squares of the gradient.
void move_moments(const Matrix& matrix, double beta2, double eps) {
  const std::int64_t tile_columns = std::min(matrix.columns, kTileColumns);
  std::vector<float> column_sums(static_cast<std::size_t>(kNumChunks * tile_columns));
  for (std::int64_t left = 0; left < matrix.columns; left += tile_columns) {
    const std::int64_t width = std::min(tile_columns, matrix.columns - left);
    const bool first = left == 0;  // the decay and eps enter a row once, its squares tile by tile
    std::fill(column_sums.begin(), column_sums.end(), 0.0f);
    for_chunks(matrix.rows, matrix.elements(),
               [&](std::int64_t chunk, std::int64_t begin, std::int64_t end) {
                 std::array<float, kRowsAtOnce> row_sums;
                 for (std::int64_t row = begin; row < end; row += kRowsAtOnce) {
                   const std::int64_t count = std::min(kRowsAtOnce, end - row);
                   row_sums.fill(0.0f);
                   optim_kernels::add_square_sums({count, width, matrix.columns},
                                                  matrix.gradient + row * matrix.columns + left,
                                                  row_sums.data(),
                                                  column_sums.data() + chunk * tile_columns);
                   move_row_moments(row_sums.data(), count, matrix.columns, first ? beta2 : 1.0,
                                    1 - beta2, first ? eps : 0.0, matrix.row_moments + row);
                 }
               });
    for (std::int64_t j = 0; j < width; ++j) {
      double sum = 0;
      for (std::int64_t chunk = 0; chunk < kNumChunks; ++chunk)
        sum += static_cast<double>(column_sums[static_cast<std::size_t>(chunk * tile_columns + j)]);
      float& moment = matrix.column_moments[left + j];
      const double mean_square = sum / static_cast<double>(matrix.rows) + eps;
      moment = static_cast<float>(beta2 * static_cast<double>(moment) + (1 - beta2) * mean_square);
    }
  }
}

/// Calls body(left, width, moment) for each tile of columns.
template <typename Body>
void for_column_tiles(const Matrix& matrix, float inverse_row_mean, const Body& body) {
  std::vector<float> factors(static_cast<std::size_t>(std::min(matrix.columns, kTileColumns)));
  for (std::int64_t left = 0; left < matrix.columns; left += kTileColumns) {
    const std::int64_t width = std::min(kTileColumns, matrix.columns - left);
    optim_kernels::inverse_roots(width, matrix.column_moments + left, factors.data());
    body(left, width, FactoredMoment{matrix.row_moments, inverse_row_mean, factors.data()});
  }
}

FactoredMoment from_row(const FactoredMoment& moment, std::int64_t row) {
  return {moment.row_moments + row, moment.inverse_row_mean, moment.column_factors};
}

void update_factored(const Matrix& matrix, const AdafactorOptions& options,
                     const Numbers& numbers) {
  move_moments(matrix, numbers.beta2, std::get<0>(options.eps()));
  const double row_sum = std::accumulate(matrix.row_moments, matrix.row_moments + matrix.rows, 0.0);
  const auto inverse_row_mean = static_cast<float>(static_cast<double>(matrix.rows) / row_sum);
  double update_squares = 0;
  for_column_tiles(matrix, inverse_row_mean,
                   [&](std::int64_t left, std::int64_t width, const FactoredMoment& moment) {
                     update_squares += sum_over_chunks(
                         matrix.rows, matrix.elements(), [&](std::int64_t begin, std::int64_t end) {
                           const Tile tile{end - begin, width, matrix.columns};
                           return optim_kernels::factored_square_sum(
                               tile, matrix.gradient + begin * matrix.columns + left,
                               from_row(moment, begin));
                         });
                   });
  const AdafactorStep step = numbers.step(options, root_mean(update_squares, matrix.elements()));
  for_column_tiles(matrix, inverse_row_mean,
                   [&](std::int64_t left, std::int64_t width, const FactoredMoment& moment) {
                     for_chunks(matrix.rows, matrix.elements(),
                                [&](std::int64_t /*chunk*/, std::int64_t begin, std::int64_t end) {
                                  const std::int64_t at = begin * matrix.columns + left;
                                  optim_kernels::factored_update(
                                      step, {end - begin, width, matrix.columns},
                                      from_row(moment, begin), matrix.parameter + at,
                                      matrix.gradient + at,
                                      matrix.exp_avg == nullptr ? nullptr : matrix.exp_avg + at);
                                });
                   });
}

void update_full(at::Tensor& parameter, const at::Tensor& gradient, AdafactorParamState& state,
                 const AdafactorOptions& options, const Numbers& numbers, float* exp_avg) {
  const std::int64_t count = parameter.numel();
  float* p = parameter.data_ptr<float>();
  const float* g = gradient.data_ptr<float>();
  float* v = state.exp_avg_sq().data_ptr<float>();
  const double squares = sum_over_chunks(count, count, [&](std::int64_t begin, std::int64_t end) {
    return optim_kernels::full_square_sum(
        end - begin, static_cast<float>(numbers.beta2), static_cast<float>(1 - numbers.beta2),
        static_cast<float>(std::get<0>(options.eps())), g + begin, v + begin);
  });
  const AdafactorStep step = numbers.step(options, root_mean(squares, count));
  for_ranges(count, [&](std::int64_t begin, std::int64_t end) {
    optim_kernels::full_update(step, end - begin, p + begin, g + begin, v + begin,
                               exp_avg == nullptr ? nullptr : exp_avg + begin);
  });
}

double root_mean_square(const at::Tensor& tensor) {
  return tensor.square().mean().sqrt().item<double>();
}

void update_plainly(at::Tensor& parameter, const at::Tensor& gradient, AdafactorParamState& state,
                    const AdafactorOptions& options) {
  const Numbers numbers = numbers_of(options, state.step(),
                                     options.scale_parameter() ? root_mean_square(parameter) : 0);
  const at::Tensor squares = gradient.square().add_(std::get<0>(options.eps()));
  at::Tensor update;
  if (is_factored(parameter)) {
    const at::Tensor matrix = squares.reshape({squares.size(0), -1});  // (rows, columns)
    state.exp_avg_sq_row().mul_(numbers.beta2).add_(matrix.mean(1), 1 - numbers.beta2);
    state.exp_avg_sq_col().mul_(numbers.beta2).add_(matrix.mean(0), 1 - numbers.beta2);
    const at::Tensor row_factors =
        (state.exp_avg_sq_row() / state.exp_avg_sq_row().mean()).rsqrt_().unsqueeze(1);
    update = row_factors.mul(state.exp_avg_sq_col().rsqrt().unsqueeze(0))
                 .reshape(gradient.sizes())
                 .mul_(gradient);
  } else {
    state.exp_avg_sq().mul_(numbers.beta2).add_(squares, 1 - numbers.beta2);
    update = state.exp_avg_sq().rsqrt().mul_(gradient);
  }
  const AdafactorStep step = numbers.step(options, root_mean_square(update));
  update.mul_(step.scale);
  if (options.beta1() > 0)
    update = state.exp_avg().mul_(options.beta1()).add_(update, 1 - options.beta1());
  parameter.sub_(parameter, options.weight_decay() * numbers.rate).sub_(update);
}

}  // namespace

Adafactor::Adafactor(std::vector<torch::optim::OptimizerParamGroup> param_groups,
                     AdafactorOptions defaults)
    : LeanOptimizer(std::move(param_groups), std::make_unique<AdafactorOptions>(defaults)) {
  Adafactor::check_options(defaults);
  check_all_options();
}

Adafactor::Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults)
    : Adafactor(std::vector<torch::optim::OptimizerParamGroup>{torch::optim::OptimizerParamGroup(
                    std::move(parameters))},
                std::move(defaults)) {}

void Adafactor::check_options(const torch::optim::OptimizerOptions& base) const {
  const auto& options = options_as<AdafactorOptions>(base, *this);
  if (!(options.lr() >= 0))
    throw ConfigError(fmt::format("the learning rate must be at least 0, not {}", options.lr()));
  if (!(options.weight_decay() >= 0))
    throw ConfigError(
        fmt::format("the weight decay must be at least 0, not {}", options.weight_decay()));
  if (!(options.clip_threshold() > 0))
    throw ConfigError(
        fmt::format("clip_threshold must be above 0, not {}", options.clip_threshold()));
  if (!(options.decay_rate() <= 0))
    throw ConfigError(fmt::format("decay_rate must be at most 0, not {}", options.decay_rate()));
  if (!(options.beta1() >= 0 && options.beta1() < 1)) {
    throw ConfigError(fmt::format("beta1 must be at least 0 and below 1, not {}", options.beta1()));
  }
  if (options.warmup_init() && !options.relative_step())
    throw ConfigError("warmup_init needs relative_step");
}

std::unique_ptr<LeanParamState> Adafactor::make_state(
    const at::Tensor& like, const torch::optim::OptimizerOptions& options) const {
  auto state = std::make_unique<AdafactorParamState>();
  if (is_factored(like)) {
    state->exp_avg_sq_row(zeroed({like.size(0)}, like.options()));
    state->exp_avg_sq_col(zeroed({like.numel() / like.size(0)}, like.options()));
  } else {
    state->exp_avg_sq(zeroed_like(like));
  }
  complete_state(like, *state, options);
  return state;
}

std::unique_ptr<LeanParamState> Adafactor::make_empty_state() const {
  return std::make_unique<AdafactorParamState>();
}

void Adafactor::complete_state(const at::Tensor& like, LeanParamState& base,
                               const torch::optim::OptimizerOptions& options) const {
  auto& state = static_cast<AdafactorParamState&>(base);
  if (static_cast<const AdafactorOptions&>(options).beta1() > 0 && !state.exp_avg().defined())
    state.exp_avg(zeroed_like(like));
}

void Adafactor::update(at::Tensor& parameter, const at::Tensor& gradient,
                       LeanParamState& base_state,
                       const torch::optim::OptimizerOptions& base_options) const {
  const auto& options = static_cast<const AdafactorOptions&>(base_options);
  auto& state = static_cast<AdafactorParamState&>(base_state);
  state.step(state.step() + 1);
  if (parameter.numel() == 0) return;
  const bool with_average = options.beta1() > 0;
  if (!parameter.is_contiguous() ||
      !are_dense_floats({&parameter, &gradient, with_average ? &state.exp_avg() : &parameter})) {
    return update_plainly(parameter, gradient, state, options);
  }
  float* p = parameter.data_ptr<float>();
  float* exp_avg = with_average ? state.exp_avg().data_ptr<float>() : nullptr;
  double parameter_squares = 0;
  if (options.scale_parameter()) {
    parameter_squares = sum_over_chunks(parameter.numel(), parameter.numel(),
                                        [p](std::int64_t begin, std::int64_t end) {
                                          return optim_kernels::square_sum(end - begin, p + begin);
                                        });
  }
  const Numbers numbers =
      numbers_of(options, state.step(), root_mean(parameter_squares, parameter.numel()));
  if (is_factored(parameter)) {
    const Matrix matrix{parameter.size(0),
                        parameter.numel() / parameter.size(0),
                        p,
                        gradient.data_ptr<float>(),
                        exp_avg,
                        state.exp_avg_sq_row().data_ptr<float>(),
                        state.exp_avg_sq_col().data_ptr<float>()};
    update_factored(matrix, options, numbers);
  } else {
    update_full(parameter, gradient, state, options, numbers, exp_avg);
  }
  parameter.unsafeGetTensorImpl()->bump_version();
}

OptimizerRow adafactor_row() {
  return {"adafactor", "rows + columns of a matrix in fp32",
          [](const OptimizerConfig& config, const NamedParameters& named, const KeepFp32State&) {
            return make_grouped<Adafactor>(config, named,
                                           AdafactorOptions(config.learning_rate)
                                               .scale_parameter(false)
                                               .weight_decay(config.weight_decay));
          },
          [](const OptimizerConfig&, const std::vector<std::int64_t>& shape) {
            const std::int64_t all = float_bytes(shape);
            if (shape.size() < 2 || all == 0) return all;
            return static_cast<std::int64_t>(sizeof(float)) * shape[0] + all / shape[0];
          }};
}

}  // namespace headroom

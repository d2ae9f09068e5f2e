#include "ops/low_rank.h"

#include <headroom/core/error.h>

#include "ops/dropout.h"
#include "ops/plain.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <string>

namespace headroom::ops {
namespace {

// to = beta * to + alpha * a b
void add_product(const at::Tensor& a, const at::Tensor& b, at::Tensor to, double beta,
                 double alpha) {
  if (!to.is_meta()) to.addmm_(a, b, beta, alpha);
}

}  // namespace

LowRankCall::LowRankCall(const std::vector<LowRank>& adapters, double scale, double dropout_p)
    : adapters_(adapters), scale_(scale), dropout_p_(dropout_p) {
  for (std::size_t i = 0; i < adapters_.size(); ++i)
    seeds_.push_back(static_cast<std::int64_t>(draw_dropout(dropout_p).seed));
}

LowRankCall::LowRankCall(const SavedData& saved_data, const char* name, at::TensorList tensors) {
  const auto found = saved_data.find(name);
  if (found == saved_data.end()) return;
  const std::vector<std::int64_t> numbers = found->second.toIntVector();
  const std::vector<double> factors =
      saved_data.at(std::string(name) + ".factors").toDoubleVector();
  for (std::size_t i = 0; i < numbers.size() / 2; ++i) {
    adapters_.push_back({tensors[2 * i], tensors[2 * i + 1], numbers[2 * i]});
    seeds_.push_back(numbers[2 * i + 1]);
  }
  scale_ = factors.at(0);
  dropout_p_ = factors.at(1);
}

void LowRankCall::keep(SavedData& saved_data, const char* name) const {
  if (empty()) return;
  std::vector<std::int64_t> numbers;
  for (std::size_t i = 0; i < adapters_.size(); ++i)
    numbers.insert(numbers.end(), {adapters_[i].first_row, seeds_[i]});
  saved_data[name] = numbers;
  saved_data[std::string(name) + ".factors"] = std::vector<double>{scale_, dropout_p_};
}

void LowRankCall::append_to(std::vector<at::Tensor>& tensors) const {
  for (const LowRank& adapter : adapters_)
    tensors.insert(tensors.end(), {adapter.down, adapter.up});
}

void LowRankCall::check(std::int64_t in, std::int64_t out, const char* layer) const {
  for (const LowRank& adapter : adapters_) {
    const bool fits = adapter.down.dim() == 2 && adapter.up.dim() == 2 &&
                      adapter.down.size(1) == in && adapter.up.size(1) == adapter.down.size(0) &&
                      adapter.first_row >= 0 && adapter.first_row + adapter.up.size(0) <= out;
    if (!fits) {
      throw ConfigError(fmt::format("an adapter of {} does not fit a layer of {} to {} features",
                                    layer, in, out));
    }
  }
}

kernels::Dropout LowRankCall::dropout(std::size_t index) const {
  return dropout_from_seed(dropout_p_, static_cast<std::uint64_t>(seeds_[index]));
}

at::Tensor LowRankCall::read(std::size_t index, const at::Tensor& x, std::int64_t first_row) const {
  if (dropout_p_ == 0.0) return x;
  at::Tensor dropped = make_floats(x.sizes(), x);
  if (!x.is_meta()) dropped.copy_(x);  // x may be columns of a wider matrix
  dropout_add(dropout(index), dropped, {}, {}, dropped, first_row);
  return dropped;
}

void LowRankCall::add(const at::Tensor& x, const at::Tensor& y, std::int64_t first_row) const {
  for (std::size_t i = 0; i < adapters_.size(); ++i) {
    const LowRank& adapter = adapters_[i];
    const at::Tensor narrow = make_floats({x.size(0), adapter.down.size(0)}, x);  // (n, r)
    linear(read(i, x, first_row), adapter.down, narrow, 0.0);
    add_product(narrow, adapter.up.t(), y.narrow(1, adapter.first_row, adapter.up.size(0)), 1.0,
                scale_);
  }
}

void LowRankCall::add_input_gradient(const at::Tensor& dy, const at::Tensor& dx,
                                     std::int64_t first_row) const {
  for (std::size_t i = 0; i < adapters_.size(); ++i) {
    const auto& [down, up, first_column] = adapters_[i];
    const at::Tensor narrow = make_floats({dy.size(0), down.size(0)}, dy);  // (n, r)
    add_product(dy.narrow(1, first_column, up.size(0)), up, narrow, 0.0, scale_);
    if (dropout_p_ == 0.0) {
      add_product(narrow, down, dx, 1.0, 1.0);
      continue;
    }
    const at::Tensor dropped = make_floats(dx.sizes(), dx);
    add_product(narrow, down, dropped, 0.0, 1.0);
    dropout_add(dropout(i), dropped, {}, {}, dropped, first_row);
    if (!dx.is_meta()) at::Tensor(dx).add_(dropped);
  }
}

void LowRankCall::add_gradients(const at::Tensor& x, const at::Tensor& dy,
                                const std::vector<ParameterGrad>& gradients,
                                std::int64_t first_row) const {
  const auto beta = [&](const ParameterGrad& gradient) {
    return first_row == 0 ? gradient.beta() : 1.0;
  };
  for (std::size_t i = 0; i < adapters_.size(); ++i) {
    const auto& [down, up, first_column] = adapters_[i];
    const ParameterGrad &ddown = gradients[2 * i], &dup = gradients[2 * i + 1];
    const at::Tensor d = dy.narrow(1, first_column, up.size(0));  // (n, rows)
    const at::Tensor in = read(i, x, first_row),
                     narrow = make_floats({x.size(0), down.size(0)}, x);  // (n, r)
    if (dup.wanted()) {
      linear(in, down, narrow, 0.0);
      add_product(d.t(), narrow, dup.gradient, beta(dup), scale_);
    }
    if (ddown.wanted()) {
      add_product(d, up, narrow, 0.0, scale_);  // the gradient of what `up` is given
      add_product(narrow.t(), in, ddown.gradient, beta(ddown), 1.0);
    }
  }
}

at::Tensor LowRankCall::add_plain(const at::Tensor& x, const at::Tensor& y) const {
  at::Tensor sum = y;
  for (const LowRank& adapter : adapters_) {
    const at::Tensor added =
        plain_linear(plain_linear(headroom::dropout(x, dropout_p_), adapter.down, {}), adapter.up,
                     {}) *
        scale_;
    sum = sum + at::constant_pad_nd(added, {adapter.first_row,
                                            y.size(-1) - adapter.first_row - adapter.up.size(0)});
  }
  return sum;
}

}  // namespace headroom::ops

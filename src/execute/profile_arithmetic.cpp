// What follows from measured profiles without running anything.
#include "execute/profile.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace headroom {
namespace {

std::int64_t on_line(std::int64_t x, std::int64_t x0, std::int64_t y0, std::int64_t x1,
                     std::int64_t y1) {
  const double slope = static_cast<double>(y1 - y0) / static_cast<double>(x1 - x0);
  const double y = static_cast<double>(y0) + slope * static_cast<double>(x - x0);
  return std::max<std::int64_t>(0, std::llround(y));
}

// A part that only one of the two has (a view, say, where the other had to copy) counts as made
// anew, which is never less.
template <typename Move>
void move_carried(StageCosts& stage, const StageCosts& other, Move move) {
  std::vector<CarriedBytes> parts;
  std::int64_t left_bytes = stage.output_bytes;
  for (CarriedBytes part : stage.carried) {
    const auto same =
        std::find_if(other.carried.begin(), other.carried.end(),
                     [&](const CarriedBytes& far) { return far.stages_back == part.stages_back; });
    if (same == other.carried.end()) continue;
    move(part.bytes, same->bytes);
    part.bytes = std::min(part.bytes, left_bytes);
    left_bytes -= part.bytes;
    parts.push_back(part);
  }
  stage.carried = std::move(parts);
}

ChainCosts interpolate_costs(const ChainCosts& small, const ChainCosts& large, std::int64_t n0,
                             std::int64_t n1, std::int64_t n) {
  ChainCosts costs = small;
  for (std::size_t i = 0; i < costs.stages.size(); ++i) {
    StageCosts& stage = costs.stages[i];
    const StageCosts& other = large.stages[i];
    const auto move = [&](std::int64_t& value, std::int64_t far) {
      value = on_line(n, n0, value, n1, far);
    };
    move(stage.output_bytes, other.output_bytes);
    move_carried(stage, other, move);
    move(stage.grad_bytes, other.grad_bytes);
    move(stage.carried_grad_bytes, other.carried_grad_bytes);
    stage.carried_grad_bytes = std::min(stage.carried_grad_bytes, stage.grad_bytes);
    move(stage.forward_ns, other.forward_ns);
    move(stage.forward_transient_bytes, other.forward_transient_bytes);
    for (std::size_t k = 0; k < stage.options.size(); ++k) {
      StageOption& option = stage.options[k];
      const StageOption& far = other.options[k];
      option.fits = option.fits && far.fits;
      move(option.kept_bytes, far.kept_bytes);
      move(option.forward_ns, far.forward_ns);
      move(option.backward_ns, far.backward_ns);
      move(option.forward_transient_bytes, far.forward_transient_bytes);
      move(option.backward_transient_bytes, far.backward_transient_bytes);
    }
  }
  return costs;
}

// Every number of bytes of a stage, with the same one of another.
template <typename Costs, typename Visit>
void for_bytes(Costs& stage, const StageCosts& other, Visit visit) {
  visit(stage.output_bytes, other.output_bytes);
  visit(stage.grad_bytes, other.grad_bytes);
  visit(stage.forward_transient_bytes, other.forward_transient_bytes);
  visit(stage.param_grad_bytes, other.param_grad_bytes);
  visit(stage.carried_grad_bytes, other.carried_grad_bytes);
  for (std::size_t i = 0; i < stage.carried.size() && i < other.carried.size(); ++i)
    visit(stage.carried[i].bytes, other.carried[i].bytes);
  for (std::size_t k = 0; k < stage.options.size(); ++k) {
    auto& option = stage.options[k];
    if (!option.fits) continue;
    visit(option.kept_bytes, other.options[k].kept_bytes);
    visit(option.forward_transient_bytes, other.options[k].forward_transient_bytes);
    visit(option.backward_transient_bytes, other.options[k].backward_transient_bytes);
  }
}

ChainCosts empty_costs(const ChainCosts& like) {
  ChainCosts costs = like;
  for (StageCosts& stage : costs.stages) {
    const std::size_t num_options = stage.options.size();
    const std::string name = stage.name;
    const std::int64_t param_grad_bytes =
        stage.param_grad_bytes;  // does not depend on the number of samples
    std::vector<CarriedBytes> carried = std::move(stage.carried);
    for (CarriedBytes& part : carried) part.bytes = 0;
    stage = StageCosts{};
    stage.carried = std::move(carried);
    stage.name = name;
    stage.param_grad_bytes = param_grad_bytes;
    stage.options.resize(num_options);
  }
  return costs;
}

}  // namespace

ChainProfile empty_profile(const ChainProfile& like) {
  ChainProfile profile;
  profile.grads_unallocated = empty_costs(like.grads_unallocated);
  profile.grads_preallocated = empty_costs(like.grads_preallocated);
  return profile;
}

bool agree(const ChainProfile& measured, const ChainProfile& counted) {
  bool same = measured.input_bytes == counted.input_bytes;
  const auto compare = [&](std::int64_t a, std::int64_t b) {
    same = same && a <= b && b <= a + a / 100 + 1024;
  };
  for (std::size_t i = 0; i < measured.grads_unallocated.stages.size(); ++i) {
    for_bytes(measured.grads_unallocated.stages[i], counted.grads_unallocated.stages[i], compare);
    for_bytes(measured.grads_preallocated.stages[i], counted.grads_preallocated.stages[i], compare);
  }
  return same;
}

void take_bytes(ChainProfile& profile, const ChainProfile& counted) {
  profile.input_bytes = counted.input_bytes;
  const auto take = [](std::int64_t& to, std::int64_t from) { to = from; };
  for (std::size_t i = 0; i < profile.grads_unallocated.stages.size(); ++i) {
    for_bytes(profile.grads_unallocated.stages[i], counted.grads_unallocated.stages[i], take);
    for_bytes(profile.grads_preallocated.stages[i], counted.grads_preallocated.stages[i], take);
  }
}

ChainProfile interpolate(const ChainProfile& small, const ChainProfile& large,
                         std::int64_t num_samples) {
  ChainProfile profile;
  profile.num_samples = num_samples;
  profile.input_bytes = on_line(num_samples, small.num_samples, small.input_bytes,
                                large.num_samples, large.input_bytes);
  profile.grads_unallocated = interpolate_costs(small.grads_unallocated, large.grads_unallocated,
                                                small.num_samples, large.num_samples, num_samples);
  profile.grads_preallocated = interpolate_costs(small.grads_preallocated, large.grads_preallocated,
                                                 small.num_samples, large.num_samples, num_samples);
  return profile;
}

}  // namespace headroom

#include "train/rank_group.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/train/trainer.h>
#include "config/argument_fields.h"
#include "core/counter_random.h"
#include "core/hash.h"
#include "core/log.h"

#include "train/stop.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace headroom {
namespace {

// Far apart for neighbouring ranks and seeds.
std::uint64_t stream_seed(std::uint64_t seed, std::uint64_t rank) {
  return mix(seed + (rank - 1) * 0x9e3779b97f4a7c15U);
}

// What ranks must have in common, one per line; what may differ by rank is left out.
std::string common_settings(const TrainingArguments& arguments, const Chain& chain,
                            const Dataset& data) {
  std::string text;
  for (const auto& [name, value] : settings_without(FieldTrait::kPerRank, arguments))
    text += fmt::format("--{} {}\n", name, value);
  // Where a rank spills is its own affair; whether it can is part of every plan.
  text += fmt::format("--spill_dir {}\n", arguments.spill_dir.empty() ? "(not given)" : "(given)");
  Sha256 names;
  for (const auto& [name, tensor] : chain.named_parameters()) {
    const std::string line = fmt::format("{} {}\n", name, fmt::join(tensor.sizes(), "x"));
    names.update(line.data(), line.size());
  }
  return text + fmt::format("parameters {}\nnames and sizes of parameters {}\nsamples {}\n",
                            chain.num_parameters(), names.hex_digest(), data.size());
}

}  // namespace

RankGroup::RankGroup(std::shared_ptr<Communicator> comm)
    : comm_(comm ? std::move(comm) : make_single_communicator()) {}

void RankGroup::check_alike(const RunSettings& settings, const Chain& chain,
                            const Dataset& data) const {
  if (size() == 1) return;
  if (settings.arguments.device != "cpu") {
    throw ConfigError(
        fmt::format("--device {} with {} ranks: ranks are connected by Gloo, which sums on the "
                    "CPU; use --device cpu",
                    settings.arguments.device, size()));
  }
  const std::vector<std::string> all =
      comm_->gather(common_settings(settings.arguments, chain, data));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    std::istringstream first(all[0]), other(all[rank]);
    for (std::string ours, theirs; std::getline(first, ours) && std::getline(other, theirs);) {
      if (ours == theirs) continue;
      throw ConfigError(fmt::format(
          "ranks must be started alike: rank 0 has '{}', rank {} has '{}'", ours, rank, theirs));
    }
  }
}

void RankGroup::check_weights_are_equal(const Chain& chain, std::int64_t update) const {
  if (size() == 1) return;
  const std::vector<std::string> hashes = comm_->gather(weights_sha256(chain));
  for (std::size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    throw CommError(
        fmt::format("the weights of rank {} differ from those of rank 0 at update {} ({:.8} and "
                    "{:.8}): the ranks do not run the "
                    "same program on the same model",
                    rank, update, hashes[rank], hashes[0]));
  }
}

void RankGroup::share_weights(const Chain& chain) const { comm_->broadcast(weights_of(chain)); }

void RankGroup::start_random_streams(std::int64_t seed) const {
  if (is_first()) return;
  seed_everything(
      stream_seed(static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(rank())));
}

std::vector<std::string> RankGroup::random_states() const {
  const at::Tensor state = cpu_random_state();
  return comm_->gather({static_cast<const char*>(state.data_ptr()), state.nbytes()});
}

void RankGroup::restore_random_states(const std::vector<std::string>& states,
                                      std::int64_t seed) const {
  const auto mine = static_cast<std::size_t>(rank());
  if (states.size() != static_cast<std::size_t>(size()) && is_first()) {
    log_info(
        fmt::format("the snapshot is of {} ranks, {} go on: the same global batches, in another "
                    "order of sums and of random numbers",
                    states.size(), size()));
  }
  if (mine >= states.size())
    return seed_everything(stream_seed(static_cast<std::uint64_t>(seed), mine));
  std::string bytes = states[mine];
  set_cpu_random_state(
      torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, torch::kByte));
}

RunPlan RankGroup::plan_together(const std::function<RunPlan()>& make) const {
  constexpr char kFits = '+', kDoesNotFit = '-', kStopped = '!', kFailed = '?';
  RunPlan made;
  std::exception_ptr failure;
  const std::string message = from_first([&]() -> std::string {
    try {
      made = make();
      return kFits + pack_plan(made);
    } catch (const BudgetError& error) {
      return kDoesNotFit + std::string(error.what());
    } catch (const Stopped&) {
      return {kStopped};
    } catch (const std::exception& error) {
      failure = std::current_exception();
      return kFailed + std::string(error.what());
    }
  });
  const std::string rest = message.substr(1);
  if (message.front() == kStopped) throw Stopped();
  if (message.front() == kDoesNotFit) throw BudgetError(rest);
  if (failure) std::rethrow_exception(failure);
  if (message.front() == kFailed) throw OtherRankFailed("rank 0 cannot plan: " + rest);
  return is_first() ? made : unpack_plan(rest);
}

std::int64_t update_scratch_bytes(const Chain& chain, std::int64_t num_ranks) {
  std::vector<at::Tensor> buffers;
  for (const auto& [name, buffer] : chain.named_buffers()) buffers.push_back(buffer);
  return std::max(exchange_scratch_bytes(chain.parameters(), num_ranks),
                  exchange_scratch_bytes(buffers, num_ranks));
}

std::vector<at::Tensor> weights_of(const Chain& chain) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : chain.named_tensors()) tensors.push_back(tensor);
  return tensors;
}

}  // namespace headroom

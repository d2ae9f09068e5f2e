// What the ranks of a run do together, besides summing gradients.
#include "train/trainer_state.h"

#include <headroom/core/error.h>
#include <headroom/core/log.h>
#include "core/hash.h"

#include <fmt/format.h>
#include <torch/torch.h>

#include <set>
#include <sstream>

namespace headroom {
namespace {

// Far apart for neighbouring ranks and seeds (the mixing of SplitMix64).
std::uint64_t stream_seed(std::uint64_t seed, std::uint64_t rank) {
  std::uint64_t mixed = seed + rank * 0x9e3779b97f4a7c15U;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31);
}

// What ranks must have in common, one per line; what is a rank's own affair is left out.
std::string common_settings(const TrainingArguments& arguments, const Chain& chain,
                            const Dataset& data) {
  static const std::set<std::string> own = {
      "output_dir", "report_to", "disable_tqdm", "json",        "sample",
      "device",     "spill_dir", "num_threads",  "ddp_timeout", "nproc_per_node"};
  std::string text;
  for (const ArgumentField& field : argument_fields()) {
    if (own.count(field.name) == 0)
      text += fmt::format("--{} {}\n", field.name, field.get(arguments));
  }
  Sha256 names;
  for (const auto& [name, tensor] : chain.named_parameters()) {
    const std::string line = fmt::format("{} {}\n", name, fmt::join(tensor.sizes(), "x"));
    names.update(line.data(), line.size());
  }
  return text + fmt::format("parameters {}\nnames and sizes of parameters {}\nsamples {}\n",
                            chain.num_parameters(), names.hex_digest(), data.size());
}

}  // namespace

void Trainer::State::tell(const std::string& message) const {
  if (comm->is_first()) log_info(message);
}

void Trainer::State::warn(const std::string& message) const {
  if (comm->is_first()) log_warning(message);
}

void Trainer::State::write(const std::string& name, const Json& json) const {
  write_file_atomically(arguments.output_dir + "/" + name, json.dump() + "\n");
}

void Trainer::State::check_ranks_are_alike() {
  if (comm->size() == 1) return;
  if (arguments.device != "cpu") {
    throw ConfigError(
        fmt::format("--device {} with {} ranks: ranks are connected by Gloo, which sums on the "
                    "CPU; use --device cpu",
                    arguments.device, comm->size()));
  }
  const std::vector<std::string> all = comm->gather(common_settings(arguments, chain, *train_data));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    std::istringstream first(all[0]), other(all[rank]);
    for (std::string ours, theirs; std::getline(first, ours) && std::getline(other, theirs);) {
      if (ours == theirs) continue;
      throw ConfigError(fmt::format(
          "ranks must be started alike: rank 0 has '{}', rank {} has '{}'", ours, rank, theirs));
    }
  }
}

std::vector<at::Tensor> Trainer::State::weights() const {
  std::vector<at::Tensor> tensors = chain.parameters();
  tensors.insert(tensors.end(), buffers.begin(), buffers.end());
  return tensors;
}

void Trainer::State::check_weights_are_equal() {
  if (comm->size() == 1) return;
  const std::vector<std::string> hashes = comm->gather(weights_sha256(chain));
  for (std::size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    throw CommError(
        fmt::format("the weights of rank {} differ from those of rank 0 at update {} ({:.8} and "
                    "{:.8}): the ranks do not run the "
                    "same program on the same model",
                    rank, position.global_step, hashes[rank], hashes[0]));
  }
}

void Trainer::State::start_afresh() {
  comm->broadcast(weights());
  if (!comm->is_first()) {
    seed_everything(stream_seed(static_cast<std::uint64_t>(arguments.seed),
                                static_cast<std::uint64_t>(comm->rank())));
  }
  prepare_optimizer();
}

void Trainer::State::restore_random_state() {
  const auto rank = static_cast<std::size_t>(comm->rank()),
             num_saved = position.random_states.size();
  if (num_saved != static_cast<std::size_t>(comm->size())) {
    tell(
        fmt::format("the snapshot is of {} ranks, {} go on: the same global batches, in another "
                    "order of sums and of random numbers",
                    num_saved, comm->size()));
  }
  if (rank < num_saved) {
    std::string bytes = position.random_states[rank];
    set_cpu_random_state(
        torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, torch::kByte));
  } else {
    seed_everything(
        stream_seed(static_cast<std::uint64_t>(arguments.seed + position.global_step), rank));
  }
}

RunPlan Trainer::State::plan_together(const std::function<RunPlan()>& make) const {
  constexpr char kFits = '+', kDoesNotFit = '-';
  RunPlan made;
  std::string message;
  if (comm->is_first()) {
    try {
      made = make();
      message = kFits + pack_plan(made);
    } catch (const BudgetError& error) {
      message = kDoesNotFit + std::string(error.what());
    }
  }
  message = comm->broadcast_bytes(message);
  if (message.front() == kDoesNotFit) throw BudgetError(message.substr(1));
  return comm->is_first() ? made : unpack_plan(message.substr(1));
}

std::string Trainer::State::save() {
  check_weights_are_equal();
  const at::Tensor state = cpu_random_state();
  position.random_states =
      comm->gather({static_cast<const char*>(state.data_ptr()), state.nbytes()});
  std::string folder;
  if (comm->is_first())
    folder = save_snapshot(arguments.output_dir, chain, *optimizer, position,
                           arguments.save_total_limit);
  return comm->broadcast_bytes(folder);
}

}  // namespace headroom

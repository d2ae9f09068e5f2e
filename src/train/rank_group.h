#pragma once

// The ranks of a run: what they exchange and decide together. One rank is a group like any other,
// and exchanges nothing.

#include <headroom/comm/communicator.h>
#include <headroom/core/error.h>
#include <headroom/data/dataset.h>
#include <headroom/model/chain.h>
#include <headroom/train/run_plan.h>

#include "train/agreement.h"
#include "train/run_settings.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace headroom {

/// Another rank failed in something that all do together. Every rank knows, and the group still
/// works.
class OtherRankFailed : public CommError {
 public:
  using CommError::CommError;
};

/// Every method but rank(), size(), is_first() and leave() is collective.
class RankGroup {
 public:
  /// A null communicator is one rank.
  explicit RankGroup(std::shared_ptr<Communicator> comm);

  std::int64_t rank() const { return comm_->rank(); }
  std::int64_t size() const { return comm_->size(); }
  bool is_first() const { return comm_->is_first(); }

  /// Throws ConfigError, on every rank, when the ranks differ in what they were asked to do.
  void check_alike(const RunSettings& settings, const Chain& chain, const Dataset& data) const;
  /// Throws CommError, on every rank, when weights or buffers are not the same everywhere, bit for
  /// bit. `update` is for the message.
  void check_weights_are_equal(const Chain& chain, std::int64_t update) const;
  /// Rank 0's weights and buffers everywhere.
  void share_weights(const Chain& chain) const;

  /// Random streams of a new run, which differ by rank; rank 0 goes on with its own.
  void start_random_streams(std::int64_t seed) const;
  /// The state of each rank's random stream, by rank.
  std::vector<std::string> random_states() const;
  /// Continues the streams. Ranks beyond those that were saved get new ones from `seed`.
  void restore_random_states(const std::vector<std::string>& states, std::int64_t seed) const;

  /// Rank 0 plans, because times differ, and all use what it planned. What `make` throws there is
  /// thrown on every rank as far as it is BudgetError or Stopped; of anything else the others throw
  /// OtherRankFailed.
  RunPlan plan_together(const std::function<RunPlan()>& make) const;
  /// As agree() of agreement.h.
  ShareReport agree(const ShareReport& report) const { return headroom::agree(*comm_, report); }

  /// True on every rank when `mine` is on one.
  bool any(bool mine) const { return comm_->max(mine ? 1 : 0) != 0; }
  /// Rank 0's text, on every rank. `make` is called there alone.
  std::string from_first(const std::function<std::string()>& make) const {
    return comm_->broadcast_bytes(is_first() ? make() : std::string());
  }
  /// The values of all ranks, by rank.
  template <typename Plain>
  std::vector<Plain> gather(const Plain& mine) const;
  /// The same for bytes, of any number.
  std::vector<std::string> gather_bytes(const std::string& mine) const {
    return comm_->gather(mine);
  }

  void sum(const std::vector<at::Tensor>& tensors, const at::Tensor& scratch) const {
    comm_->sum(tensors, scratch);
  }
  void broadcast(const std::vector<at::Tensor>& tensors, const at::Tensor& scratch) const {
    comm_->broadcast(tensors, scratch);
  }

  /// Calls `call`; when it throws, leaves the group, because the other ranks must not wait for one
  /// that has failed.
  template <typename Call>
  auto leaving_on_errors(const Call& call) const;

 private:
  std::shared_ptr<Communicator> comm_;
};

/// Scratch memory for what ranks exchange in an update of this chain.
std::int64_t update_scratch_bytes(const Chain& chain, std::int64_t num_ranks);

/// Parameters, then buffers.
std::vector<at::Tensor> weights_of(const Chain& chain);

template <typename Plain>
std::vector<Plain> RankGroup::gather(const Plain& mine) const {
  static_assert(std::is_trivially_copyable_v<Plain>, "it travels as its bytes");
  std::vector<Plain> result;
  for (const std::string& bytes :
       comm_->gather({reinterpret_cast<const char*>(&mine), sizeof(mine)})) {
    result.emplace_back();
    std::memcpy(&result.back(), bytes.data(), sizeof(Plain));
  }
  return result;
}

template <typename Call>
auto RankGroup::leaving_on_errors(const Call& call) const {
  try {
    return call();
  } catch (...) {
    comm_->leave();
    throw;
  }
}

}  // namespace headroom

#pragma once

// Weights, gradients and optimizer state that live on disk while no stage uses them.

#include <headroom/model/chain.h>
#include <headroom/optim/optimizer.h>
#include <headroom/plan/paging.h>
#include "memory/spill_store.h"
#include "plan/page_walk.h"

#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace headroom {

/// Moves what a plan pages between memory and a store, in the order of a PageWalk. A parameter
/// keeps its tensor; while it is on disk, the tensor's memory is a mapping of the store's file, so
/// that whoever reads it without asking (a snapshot, a hash) reads the right values, slowly. All
/// calls are of one thread.
class StaticPager {
 public:
  /// Bytes of optimizer state for a parameter.
  using StateBytes = std::function<std::int64_t(const at::Tensor& parameter)>;

  /// Pages parameters of `chain` to a file in `folder`, which is made when it is first needed.
  /// `may_stream_state` says that the optimizer has_independent_elements().
  StaticPager(const Chain& chain, std::string folder, const StateBytes& state_bytes,
              bool may_stream_state = false);
  ~StaticPager();
  StaticPager(const StaticPager&) = delete;
  StaticPager& operator=(const StaticPager&) = delete;

  /// Parameters by the stages that use them. Those whose memory is not all their own are in none.
  const std::vector<PageUnit>& units() const { return units_; }
  const std::vector<at::Tensor>& parameters(std::size_t unit) const { return parameters_[unit]; }
  /// Of weights and state of the units that are in memory now.
  std::int64_t resident_bytes() const;

  bool has_weights_on_disk() const;

  /// The optimizer whose state is paged; null: none.
  void use_optimizer(LeanOptimizer* optimizer);
  /// Brings everything to where the plan says it is between updates; an inactive plan brings
  /// everything back. No walk may be under way. Throws BudgetError when the disk is full.
  void adopt(const PagingPlan& plan);
  /// The plan in force.
  const PagingPlan& plan() const { return plan_; }
  bool is_active() const { return plan_.is_active(); }
  /// The same with nothing resident and nothing read ahead, for measuring one stage after another.
  void adopt_least();

  /// Begins to walk. The steps are carried out by before() for each of them, in order, and for
  /// their number at the end.
  void start(std::vector<PageStep> steps);
  void before(std::size_t step);
  /// Whether the walk under way has changed weights or state that are not on disk yet.
  bool has_unwritten() const { return walk_ && walk_->has_unwritten(); }
  /// Ends a walk anywhere: what was read is dropped, what was changed is lost. Never throws.
  void abandon() noexcept;

  /// Frees the gradient of a parameter of this unit, which its update has used up. It must be
  /// defined, and the walk must have brought it.
  void drop_gradient(std::size_t unit, at::Tensor& parameter);
  /// Updates a parameter of a unit whose state passes in pieces; the walk has brought its weights
  /// and its gradient.
  void step_streaming(at::Tensor& parameter);

  /// Where pages are.
  const std::shared_ptr<SpillStore>& store();
  std::vector<TransferRecord> recent_transfers() const;
  /// What the disk takes for a byte, measured now with a few megabytes.
  DiskSpeed measure_disk();

 private:
  // The memory of one tensor.
  struct Item {
    c10::Storage storage;
    c10::DataPtr mapping;   // while the storage has memory of its own; null: it was never on disk
    c10::DataPtr incoming;  // while it is read
    SpillStore::Ticket ticket = 0;  // 0: no transfer is under way
  };

  // The tensors that a page has now: gradients and state come and go.
  std::vector<at::Tensor> tensors_of(const Page& page) const;
  void find_items(std::size_t page);
  bool is_in_memory(const Item& item) const;
  void put_on_disk(std::size_t page);
  void put_on_disk(Item& item);
  void put_in_memory(std::size_t page);
  void make_room(Item& item);
  void prepare_state(const Page& page);
  void write(std::size_t page);
  void wait(std::size_t page);
  void free(std::size_t page);
  void read(std::size_t page);
  void receive(std::size_t page);

  std::string folder_;
  std::vector<PageUnit> units_;
  std::vector<std::vector<at::Tensor>> parameters_;  // by unit
  std::shared_ptr<SpillStore> store_;                // null until something is paged
  LeanOptimizer* optimizer_ = nullptr;
  PagingPlan plan_;
  std::map<const c10::TensorImpl*, std::size_t> group_of_;  // of the optimizer
  std::vector<std::vector<Item>> pages_;
  std::vector<PageStep> steps_;  // of the walk
  std::optional<PageWalk> walk_;
};

/// Where no other plan is: a stage's weights come before it is run and go before the next one is.
class StagewiseScope {
 public:
  /// Does nothing with a pager that is null or inactive.
  StagewiseScope(StaticPager* pager, std::size_t num_stages);
  ~StagewiseScope();
  StagewiseScope(const StagewiseScope&) = delete;
  StagewiseScope& operator=(const StagewiseScope&) = delete;
  /// Of any stages, in any order.
  void before(std::size_t stage);

 private:
  StaticPager* pager_;
  std::vector<PageStep> steps_;  // by stage
};

}  // namespace headroom

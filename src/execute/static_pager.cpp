#include "execute/static_pager.h"

#include <headroom/memory/meter.h>

#include "execute/state_stream.h"
#include "memory/pool.h"

#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <set>
#include <utility>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;

Owner owner_of(PageKind kind) {
  return kind == PageKind::kWeights     ? Owner::kWeights
         : kind == PageKind::kGradients ? Owner::kGradients
                                        : Owner::kOptimizer;
}

c10::DataPtr allocate(std::size_t num_bytes, Owner owner) {
  const OwnerScope scope(owner);
  return c10::GetAllocator(c10::kCPU)->allocate(num_bytes);
}

// A DataPtr that was moved from still seems to point somewhere.
c10::DataPtr take(c10::DataPtr& data) { return std::exchange(data, c10::DataPtr()); }

// All of the storage is the tensor's.
bool owns_its_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.has_storage() && tensor.numel() > 0 &&
         tensor.storage().nbytes() == tensor.nbytes();
}

Extent extent_of(const c10::Storage& storage, const c10::DataPtr& mapping) {
  return mapped_extent(mapping ? mapping : storage.data_ptr());
}

}  // namespace

StaticPager::StaticPager(const Chain& chain, std::string folder, const StateBytes& state_bytes,
                         bool may_stream_state)
    : folder_(std::move(folder)) {
  std::map<const c10::TensorImpl*, std::vector<int>> users;
  std::vector<at::Tensor> all;
  std::map<const c10::StorageImpl*, int> num_holders;
  for (std::size_t stage = 0; stage < chain.size(); ++stage) {
    const auto module = chain.stage(stage).module();
    if (!module) continue;
    for (const at::Tensor& parameter : module->parameters()) {
      std::vector<int>& stages = users[parameter.unsafeGetTensorImpl()];
      if (stages.empty()) {
        all.push_back(parameter);
        if (parameter.has_storage()) ++num_holders[parameter.storage().unsafeGetStorageImpl()];
      }
      if (stages.empty() || stages.back() != static_cast<int>(stage))
        stages.push_back(static_cast<int>(stage));
    }
  }
  std::map<std::pair<std::vector<int>, bool>, std::size_t>
      unit_of;  // by stages and what is trained
  std::set<std::size_t> whole_only;
  for (const at::Tensor& parameter : all) {
    const bool is_meta = parameter.is_meta();  // an estimate has sizes alone
    if (!is_meta && (!owns_its_memory(parameter) ||
                     num_holders.at(parameter.storage().unsafeGetStorageImpl()) > 1))
      continue;
    const std::vector<int>& stages = users.at(parameter.unsafeGetTensorImpl());
    const auto [found, is_new] =
        unit_of.emplace(std::pair(stages, parameter.requires_grad()), units_.size());
    if (is_new) {
      units_.push_back({chain.stage(static_cast<std::size_t>(stages.front())).name(), stages, {}});
      parameters_.emplace_back();
    }
    const auto bytes = static_cast<std::int64_t>(parameter.nbytes());
    PageUnit& unit = units_[found->second];
    unit.bytes[static_cast<std::size_t>(PageKind::kWeights)] += bytes;
    if (parameter.requires_grad()) {
      unit.bytes[static_cast<std::size_t>(PageKind::kGradients)] += bytes;
      const std::int64_t state = state_bytes(parameter);
      unit.bytes[static_cast<std::size_t>(PageKind::kState)] += state;
      const bool is_plain = parameter.is_contiguous() && parameter.scalar_type() == at::kFloat;
      if (may_stream_state && is_plain && state > 0) {
        // The gradients of the parameters before are gone by then.
        const std::int64_t gone = unit.bytes_of(PageKind::kGradients) - bytes;
        unit.stream_bytes = std::max(unit.stream_bytes, state_stream_bytes(bytes, state) - gone);
      } else {
        whole_only.insert(found->second);
      }
    }
    parameters_[found->second].push_back(parameter);
  }
  for (const std::size_t unit : whole_only) units_[unit].stream_bytes = 0;
  pages_.resize(units_.size() * kNumPageKinds);
}

// What is on disk stays there, as mappings that hold the file.
StaticPager::~StaticPager() { abandon(); }

const std::shared_ptr<SpillStore>& StaticPager::store() {
  if (store_) return store_;
  // A model that was made on disk brings its store.
  for (const std::vector<at::Tensor>& unit : parameters_) {
    for (const at::Tensor& parameter : unit) {
      if (!store_) store_ = mapped_store(parameter.storage().data_ptr());
    }
  }
  if (!store_) store_ = std::make_shared<SpillStore>(folder_);
  return store_;
}

void StaticPager::use_optimizer(LeanOptimizer* optimizer) {
  optimizer_ = optimizer;
  group_of_.clear();
  for (std::size_t unit = 0; unit < units_.size(); ++unit)
    pages_[Page{unit, PageKind::kState}.index()].clear();
  if (optimizer == nullptr) return;
  for (std::size_t group = 0; group < optimizer->param_groups().size(); ++group) {
    for (const at::Tensor& parameter : optimizer->param_groups()[group].params())
      group_of_[parameter.unsafeGetTensorImpl()] = group;
  }
}

std::vector<at::Tensor> StaticPager::tensors_of(const Page& page) const {
  if (page.kind == PageKind::kWeights) return parameters_[page.unit];
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& parameter : parameters_[page.unit]) {
    if (page.kind == PageKind::kGradients) {
      if (parameter.grad().defined()) tensors.push_back(parameter.grad());
    } else if (optimizer_ != nullptr) {
      for (const at::Tensor& tensor : optimizer_->state_tensors(parameter))
        tensors.push_back(tensor);
    }
  }
  return tensors;
}

void StaticPager::find_items(std::size_t page) {
  std::vector<Item> items;
  std::set<const c10::StorageImpl*> seen;
  for (const at::Tensor& tensor : tensors_of(Page::at(page))) {
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (storage->nbytes() == 0 || !seen.insert(storage).second) continue;
    const auto known = std::find_if(
        pages_[page].begin(), pages_[page].end(),
        [&](const Item& item) { return item.storage.unsafeGetStorageImpl() == storage; });
    if (known == pages_[page].end()) {
      items.push_back({tensor.storage(), {}, {}, 0});
    } else {
      items.push_back({known->storage, take(known->mapping), take(known->incoming), known->ticket});
    }
  }
  pages_[page] = std::move(items);
}

bool StaticPager::is_in_memory(const Item& item) const {
  return mapped_extent(item.storage.data_ptr()).num_bytes == 0;
}

std::int64_t StaticPager::resident_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    if (Page::at(page).kind == PageKind::kGradients) continue;
    for (const at::Tensor& tensor : tensors_of(Page::at(page))) {
      if (tensor.has_storage() && mapped_extent(tensor.storage().data_ptr()).num_bytes == 0)
        bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
    }
  }
  return bytes;
}

bool StaticPager::has_weights_on_disk() const {
  for (const std::vector<at::Tensor>& unit : parameters_) {
    for (const at::Tensor& parameter : unit) {
      if (mapped_extent(parameter.storage().data_ptr()).num_bytes > 0) return true;
    }
  }
  return false;
}

void StaticPager::adopt(const PagingPlan& plan) {
  abandon();
  plan_ = plan;
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    if (Page::at(page).kind == PageKind::kGradients) continue;  // there are none now
    find_items(page);
    const bool on_disk = plan.is_active() && plan.pages(Page::at(page).unit, Page::at(page).kind);
    if (on_disk) put_on_disk(page);
  }
  // Only now is there room.
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    if (Page::at(page).kind == PageKind::kGradients) continue;
    const bool on_disk = plan.is_active() && plan.pages(Page::at(page).unit, Page::at(page).kind);
    if (!on_disk) put_in_memory(page);
  }
}

void StaticPager::adopt_least() {
  PagingPlan plan;
  plan.units = units_;
  plan.is_paged.assign(units_.size(), {true, true, true});
  adopt(plan);
}

// Space on disk, and its mapping, for memory that was never there.
void StaticPager::make_room(Item& item) {
  if (!item.mapping)
    item.mapping = SpillStore::map(
        store(), store()->reserve(static_cast<std::int64_t>(item.storage.nbytes())));
}

void StaticPager::put_on_disk(std::size_t page) {
  for (Item& item : pages_[page]) {
    if (is_in_memory(item)) put_on_disk(item);
  }
}

void StaticPager::put_on_disk(Item& item) {
  make_room(item);
  store()->wait(store()->write(extent_of(item.storage, item.mapping), item.storage.data()));
  item.storage.set_data_ptr(take(item.mapping));
}

void StaticPager::put_in_memory(std::size_t page) {
  for (Item& item : pages_[page]) {
    if (is_in_memory(item)) continue;
    c10::DataPtr memory = allocate(item.storage.nbytes(), owner_of(Page::at(page).kind));
    store()->wait(store()->read(extent_of(item.storage, {}), memory.get()));
    item.storage.set_data_ptr(std::move(memory));
  }
}

void StaticPager::start(std::vector<PageStep> steps) {
  abandon();
  steps_ = std::move(steps);
  walk_.emplace(plan_, steps_);
}

void StaticPager::before(std::size_t step) {
  const PageMoves moves = walk_->before(step);
  for (const std::size_t page : moves.finished) wait(page);
  for (const std::size_t page : moves.written) write(page);
  for (const std::size_t page : moves.settled) wait(page);
  for (const std::size_t page : moves.freed) free(page);
  for (const std::size_t page : moves.read) read(page);
  for (const std::size_t page : moves.awaited) receive(page);
  for (const std::size_t page : moves.ahead) read(page);
  if (step == walk_->steps().size()) walk_.reset();
}

void StaticPager::write(std::size_t page) {
  find_items(page);
  for (Item& item : pages_[page]) {
    make_room(item);
    item.ticket = store()->write(extent_of(item.storage, item.mapping), item.storage.data());
  }
}

void StaticPager::wait(std::size_t page) {
  for (Item& item : pages_[page]) {
    if (item.ticket != 0) store()->wait(std::exchange(item.ticket, 0));
  }
}

void StaticPager::free(std::size_t page) {
  for (Item& item : pages_[page]) {
    if (item.mapping) item.storage.set_data_ptr(take(item.mapping));
  }
  // Gradients whose update is done are nobody's any more.
  if (Page::at(page).kind == PageKind::kGradients && tensors_of(Page::at(page)).empty())
    pages_[page].clear();
}

void StaticPager::prepare_state(const Page& page) {
  const OwnerScope owner(Owner::kOptimizer);
  for (const at::Tensor& parameter : parameters_[page.unit]) {
    const auto group = group_of_.find(parameter.unsafeGetTensorImpl());
    if (group != group_of_.end() && parameter.requires_grad())
      optimizer_->prepare_state(parameter, group->second);
  }
}

void StaticPager::drop_gradient(std::size_t unit, at::Tensor& parameter) {
  const c10::StorageImpl* storage = parameter.grad().storage().unsafeGetStorageImpl();
  std::vector<Item>& items = pages_[Page{unit, PageKind::kGradients}.index()];
  const auto known = std::find_if(items.begin(), items.end(), [&](const Item& item) {
    return item.storage.unsafeGetStorageImpl() == storage;
  });
  if (known != items.end()) items.erase(known);
  parameter.mutable_grad() = at::Tensor();
}

void StaticPager::step_streaming(at::Tensor& parameter) {
  const std::size_t group = group_of_.at(parameter.unsafeGetTensorImpl());
  {
    const MappedAllocationScope on_disk(store());
    const OwnerScope owner(Owner::kOptimizer);
    optimizer_->prepare_state(parameter, group);
  }
  // What is small was made in memory.
  for (const at::Tensor& tensor : optimizer_->state_tensors(parameter)) {
    Item item{tensor.storage(), {}, {}, 0};
    if (is_in_memory(item)) put_on_disk(item);
  }
  headroom::step_streaming(store(), *optimizer_, parameter, group);
}

void StaticPager::read(std::size_t page) {
  const PageKind kind = Page::at(page).kind;
  if (kind == PageKind::kGradients) find_items(page);  // of the update before
  if (kind == PageKind::kState && optimizer_ != nullptr) {
    prepare_state(Page::at(page));
    find_items(page);
  }
  for (Item& item : pages_[page]) {
    if (is_in_memory(item)) continue;  // state that was made just now
    item.incoming = allocate(item.storage.nbytes(), owner_of(kind));
    item.ticket = store()->read(extent_of(item.storage, {}), item.incoming.get());
  }
}

void StaticPager::receive(std::size_t page) {
  for (Item& item : pages_[page]) {
    if (item.ticket == 0) continue;
    store()->wait(std::exchange(item.ticket, 0));
    item.mapping = item.storage.set_data_ptr(take(item.incoming));
  }
}

void StaticPager::abandon() noexcept {
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    for (Item& item : pages_[page]) {
      if (item.ticket != 0) store_->wait_quietly(std::exchange(item.ticket, 0));
      item.incoming.clear();
      if (item.mapping) item.storage.set_data_ptr(take(item.mapping));
    }
    if (Page::at(page).kind == PageKind::kGradients) pages_[page].clear();
  }
  walk_.reset();
}

std::vector<TransferRecord> StaticPager::recent_transfers() const {
  return store_ ? store_->recent_transfers() : std::vector<TransferRecord>{};
}

DiskSpeed StaticPager::measure_disk() {
  constexpr std::int64_t kBytes = std::int64_t{8} << 20;
  constexpr int kRuns = 4;
  // No tensor's, so that no budget counts it; on pages like one's, so that it goes the same way.
  const std::unique_ptr<char, decltype(&std::free)> bytes(
      static_cast<char*>(std::aligned_alloc(kHugePageBytes, kBytes)), &std::free);
  if (bytes == nullptr) throw std::bad_alloc();
  ask_for_huge_pages(bytes.get(), bytes.get() + kBytes);
  std::memset(bytes.get(), 'x', kBytes);
  const Extent extent = store()->reserve(kBytes);
  DiskSpeed speed;
  const std::int64_t worked_before = store()->traffic().processor_ns;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = Clock::now();
    store()->wait(store()->write(extent, bytes.get()));
    const auto written = Clock::now();
    store()->wait(store()->read(extent, bytes.get()));
    const auto read = Clock::now();
    speed.write_ns_per_byte += std::chrono::duration<double, std::nano>(written - start).count();
    speed.read_ns_per_byte += std::chrono::duration<double, std::nano>(read - written).count();
  }
  store()->release(extent);
  speed.taken_ns_per_byte =
      static_cast<double>(store()->traffic().processor_ns - worked_before) / (2 * kRuns * kBytes);
  speed.write_ns_per_byte /= kRuns * static_cast<double>(kBytes);
  speed.read_ns_per_byte /= kRuns * static_cast<double>(kBytes);
  return speed;
}

StagewiseScope::StagewiseScope(StaticPager* pager, std::size_t num_stages)
    : pager_(pager != nullptr && pager->is_active() ? pager : nullptr) {
  if (pager_ != nullptr) steps_ = forward_steps(pager_->units(), num_stages);
}

StagewiseScope::~StagewiseScope() {
  if (pager_ != nullptr) pager_->abandon();
}

void StagewiseScope::before(std::size_t stage) {
  if (pager_ == nullptr) return;
  pager_->start({steps_.at(stage)});  // which drops what the stage before has read
  pager_->before(0);
}

}  // namespace headroom

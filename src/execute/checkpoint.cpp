#include <headroom/execute/checkpoint.h>

#include <headroom/core/random.h>
#include <headroom/memory/meter.h>
#include "core/tensor_hash.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>
#include <mutex>
#include <sstream>

#include "core/engine.h"
#include "execute/recompute_state.h"

namespace headroom::detail {
namespace {

namespace autograd = torch::autograd;

class Frame;

// Ends a recomputation from inside of fn. Not a std::exception, so that fn does not catch it by
// accident.
struct StopRecompute {
  const Frame* frame;
};

std::string shape_text(c10::IntArrayRef sizes, at::ScalarType dtype) {
  std::ostringstream text;
  text << c10::toString(dtype) << sizes;
  return text.str();
}

std::string shape_text(const at::Tensor& tensor) {
  return shape_text(tensor.sizes(), tensor.scalar_type());
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : autograd::impl::version_counter(tensor).current_version();
}

// A tensor that is kept from forward to recomputation. It goes through whatever hooks are outside
// of this checkpoint: an outer checkpoint drops it and recomputes it, a KeepAs scope compresses or
// spills it.
class KeptTensor {
 public:
  explicit KeptTensor(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    requires_grad_ = tensor.requires_grad();
    // Detached, because the graph behind it is not ours to keep alive.
    at::Tensor detached = tensor.detach();
    if (!tensor.is_inference()) version_ = autograd::impl::version_counter(tensor);
    saved_version_ = version_of(tensor);
    if (current_hook_source()) {
      saved_ = std::make_unique<autograd::SavedVariable>(detached, /*is_output=*/false);
    } else {
      tensor_ = std::move(detached);
    }
  }

  bool was_changed() const {
    return saved_version_ != (version_.enabled() ? version_.current_version() : saved_version_);
  }

  /// A leaf that requires grad if the tensor did.
  at::Tensor get() const {
    at::Tensor tensor = saved_ ? saved_->unpack() : tensor_;
    if (!tensor.defined()) return tensor;
    tensor = tensor.detach();
    tensor.set_requires_grad(requires_grad_);
    return tensor;
  }

 private:
  at::Tensor tensor_;
  std::unique_ptr<autograd::SavedVariable> saved_;
  bool requires_grad_ = false;
  c10::VariableVersion version_{c10::VariableVersion::DISABLED};
  std::uint32_t saved_version_ = 0;
};

// One call of checkpoint(). The graph that fn makes owns it, through the hooks of what fn's
// operations saved.
class Frame final : public SavedTensorHookSource,
                    public BackwardListener,
                    public std::enable_shared_from_this<Frame> {
 public:
  Frame(const CheckpointOptions& options, Callee callee, Recompute recompute)
      : options_(options),
        callee_(std::move(callee)),
        fn_(std::move(recompute)),
        owner_(current_owner()),
        autocast_(AutocastState::capture()) {}

  void run_first(const std::vector<at::Tensor>& inputs, const FirstCall& first_call);

  // One hook per tensor that the first forward saves.
  std::unique_ptr<autograd::SavedVariableHooks> make_hooks() override;
  std::size_t add_slot(const at::Tensor& saved);
  at::Tensor take(std::size_t index);
  void drop(std::size_t index) noexcept;
  void backward_ended() noexcept override;

  // The recomputation saves its tensor number `index`.
  void fill(std::size_t index, const at::Tensor& saved);

 private:
  // A tensor that fn saved: only what it looked like, until it is recomputed.
  struct Slot {
    c10::DimVector sizes;
    at::ScalarType dtype;
    std::uint32_t forward_version;
    const void* leaf_storage;  // set when forward saved a leaf, such as a mask: it must be the same
                               // in the recomputation
    std::uint64_t hash = 0;
    bool is_needed = true;
    at::Tensor tensor;
    std::uint32_t version = 0;  // of `tensor` when it was saved
  };
  struct Parameter {
    at::Tensor tensor;
    std::uint32_t version;
  };

  void note_parameters(const std::vector<at::Tensor>& outputs, std::uint64_t first_sequence_number);
  void require_unchanged() const;
  void recompute();
  void call_again(const std::vector<at::Tensor>& inputs);
  void require_complete() const;
  std::string place() const;
  std::string parameter_name(const at::Tensor& parameter) const;

  CheckpointOptions options_;
  Callee callee_;
  Recompute fn_;
  Owner owner_;
  AutocastState autocast_;
  TrainingFlags training_;
  std::optional<RandomState> random_;
  std::vector<KeptTensor> inputs_;
  std::vector<Parameter> parameters_;
  std::vector<Slot> slots_;
  std::size_t num_recomputed_ = 0;  // tensors that the recomputation has saved so far
  std::size_t last_needed_ = 0;
  std::recursive_mutex mutex_;  // two threads may go backward through one graph
};

// Stands for a tensor of the first forward.
class DroppedTensor final : public autograd::SavedVariableHooks {
 public:
  explicit DroppedTensor(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  ~DroppedTensor() override {
    if (index_ != kNone) frame_->drop(index_);
  }
  void call_pack_hook(const at::Tensor& tensor) override { index_ = frame_->add_slot(tensor); }
  at::Tensor call_unpack_hook() override { return frame_->take(index_); }

 private:
  static constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  std::shared_ptr<Frame> frame_;
  std::size_t index_ = kNone;
};

// Hands the tensors of a recomputation to the frame. Its graph is discarded, but fn may itself go
// backward through it.
class RecomputedTensors final : public SavedTensorHookSource {
 public:
  explicit RecomputedTensors(Frame& frame) : frame_(frame) {}
  std::unique_ptr<autograd::SavedVariableHooks> make_hooks() override {
    return std::make_unique<Hooks>(*this);
  }

 private:
  class Hooks final : public autograd::SavedVariableHooks {
   public:
    explicit Hooks(RecomputedTensors& source) : source_(source) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = tensor.detach();
      source_.frame_.fill(source_.next_index_++, tensor);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    RecomputedTensors& source_;
    at::Tensor tensor_;
  };
  Frame& frame_;
  std::size_t next_index_ = 0;
};

void Frame::run_first(const std::vector<at::Tensor>& inputs, const FirstCall& first_call) {
  if (callee_.module) training_ = TrainingFlags(*callee_.module);
  if (options_.preserve_random_state) random_ = RandomState::capture();
  inputs_.reserve(inputs.size());
  for (const at::Tensor& input : inputs) inputs_.emplace_back(input);
  const std::uint64_t first_sequence_number = at::sequence_number::peek();
  std::vector<at::Tensor> outputs;
  {
    const SavedTensorHookScope scope(this);
    outputs = first_call();
  }
  if (!slots_.empty()) note_parameters(outputs, first_sequence_number);
}

std::unique_ptr<autograd::SavedVariableHooks> Frame::make_hooks() {
  return std::make_unique<DroppedTensor>(shared_from_this());
}

std::size_t Frame::add_slot(const at::Tensor& saved) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  Slot slot;
  slot.sizes = saved.sizes();
  slot.dtype = saved.scalar_type();
  slot.forward_version = version_of(saved);
  slot.leaf_storage =
      saved.is_leaf() && saved.has_storage() ? saved.storage().unsafeGetStorageImpl() : nullptr;
  if (options_.check_values) slot.hash = value_hash(saved);
  slots_.push_back(std::move(slot));
  return slots_.size() - 1;
}

void Frame::drop(std::size_t index) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  slots_[index].is_needed = false;
  slots_[index].tensor.reset();
}

void Frame::backward_ended() noexcept {
  // A backward to some of the inputs leaves tensors behind that it did not get to.
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (Slot& slot : slots_) slot.tensor.reset();
}

at::Tensor Frame::take(std::size_t index) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!slots_[index].tensor.defined()) recompute();
  Slot& slot = slots_[index];
  if (version_of(slot.tensor) != slot.version) {
    throw CheckpointError(
        fmt::format("{}: saved tensor {}, {}, was changed in place after it was saved; clone it "
                    "before the change",
                    place(), index, shape_text(slot.tensor)));
  }
  // With a graph that stays, its hooks stay too: the tensor must not wait for them.
  return backward_keeps_graph() ? std::exchange(slot.tensor, at::Tensor()) : slot.tensor;
}

// Every parameter that fn's graph leads to, also those of which no operation saves anything (a
// bias).
void Frame::note_parameters(const std::vector<at::Tensor>& outputs,
                            std::uint64_t first_sequence_number) {
  std::vector<autograd::Node*> to_visit;
  ska::flat_hash_set<autograd::Node*> seen;
  const auto visit = [&](autograd::Node* node) {
    if (node && node->sequence_nr() >= first_sequence_number && seen.insert(node).second)
      to_visit.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined()) visit(output.grad_fn().get());
  }
  while (!to_visit.empty()) {
    autograd::Node* node = to_visit.back();
    to_visit.pop_back();
    constexpr std::uint64_t kLeafNumber = std::numeric_limits<std::uint64_t>::max();
    if (node->sequence_nr() == kLeafNumber) {
      if (auto* leaf = dynamic_cast<autograd::AccumulateGrad*>(node))
        parameters_.push_back({leaf->variable, version_of(leaf->variable)});
    }
    for (const autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
}

void Frame::require_unchanged() const {
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i].was_changed()) continue;
    throw CheckpointError(
        fmt::format("{}: tensor {} of its arguments was changed in place since forward, or by "
                    "forward itself; pass a clone",
                    place(), i));
  }
  for (const Parameter& parameter : parameters_) {
    if (version_of(parameter.tensor) == parameter.version) continue;
    throw CheckpointError(fmt::format(
        "{}: {} was changed in place between forward and backward; run backward before updating it",
        place(), parameter_name(parameter.tensor)));
  }
}

void Frame::recompute() {
  require_unchanged();
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
  for (const KeptTensor& input : inputs_) inputs.push_back(input.get());
  num_recomputed_ = 0;
  last_needed_ = slots_.size() - 1;
  while (last_needed_ > 0 && !slots_[last_needed_].is_needed) --last_needed_;
  tell_when_backward_ends(weak_from_this());
  try {
    call_again(inputs);
    require_complete();
  } catch (...) {
    for (Slot& slot : slots_) slot.tensor.reset();
    throw;
  }
}

void Frame::call_again(const std::vector<at::Tensor>& inputs) {
  std::optional<RandomStateScope> random;
  if (random_) random.emplace(*random_);
  const AutocastStateScope autocast(autocast_);
  const TrainingFlagsScope training(training_);
  const OwnerScope owner(owner_);
  const at::AutoGradMode grad_mode(true);
  UndoWritesScope undo_writes;
  RecomputedTensors recomputed(*this);
  const SavedTensorHookScope scope(&recomputed);
  try {
    fn_(inputs);
  } catch (const StopRecompute& stop) {
    if (stop.frame != this) throw;
  }
  undo_writes.rethrow_failure();
}

void Frame::fill(std::size_t index, const at::Tensor& saved) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  num_recomputed_ = index + 1;
  if (index >= slots_.size()) return;
  Slot& slot = slots_[index];
  if (saved.sizes() != c10::IntArrayRef(slot.sizes) || saved.scalar_type() != slot.dtype) {
    throw CheckpointError(
        fmt::format("{}: saved tensor {}{} is {} in the recomputation and was {} in forward; fn "
                    "must do the same each time",
                    place(), index, saved.grad_fn() ? " (of " + saved.grad_fn()->name() + ")" : "",
                    shape_text(saved), shape_text(slot.sizes, slot.dtype)));
  }
  if (slot.leaf_storage && saved.has_storage() &&
      saved.storage().unsafeGetStorageImpl() == slot.leaf_storage &&
      version_of(saved) != slot.forward_version) {
    throw CheckpointError(
        fmt::format("{}: {}, which fn uses, was changed in place between forward and backward; run "
                    "backward before that",
                    place(), parameter_name(saved)));
  }
  if (options_.check_values && value_hash(saved) != slot.hash) {
    throw CheckpointError(fmt::format(
        "{}: saved tensor {}{}, {}, has other values in the recomputation than in forward", place(),
        index, saved.grad_fn() ? " (of " + saved.grad_fn()->name() + ")" : "", shape_text(saved)));
  }
  if (slot.is_needed) {
    slot.tensor = saved.detach();
    slot.version = version_of(saved);
  }
  if (index == last_needed_ && !options_.check_values) throw StopRecompute{this};
}

void Frame::require_complete() const {
  const bool is_wrong =
      options_.check_values ? num_recomputed_ != slots_.size() : num_recomputed_ <= last_needed_;
  if (is_wrong) {
    throw CheckpointError(fmt::format(
        "{}: the recomputation saved {} tensors, forward saved {}; fn must do the same each time",
        place(), num_recomputed_, slots_.size()));
  }
}

std::string Frame::place() const {
  if (!options_.name.empty()) return "checkpoint '" + options_.name + "'";
  return "checkpoint of " +
         (callee_.module ? callee_.module->name() : c10::demangle(callee_.type->name()));
}

std::string Frame::parameter_name(const at::Tensor& parameter) const {
  if (callee_.module) {
    for (const auto& named : callee_.module->named_parameters()) {
      if (named.value().is_alias_of(parameter))
        return "parameter '" + named.key() + "', " + shape_text(parameter);
    }
  }
  return (parameter.requires_grad() ? "a parameter, " : "a tensor, ") + shape_text(parameter);
}

}  // namespace

void run_checkpointed(const CheckpointOptions& options, Callee callee,
                      std::vector<at::Tensor> inputs, Recompute recompute,
                      const FirstCall& first_call) {
  MemoryMeter::instance();
  std::make_shared<Frame>(options, std::move(callee), std::move(recompute))
      ->run_first(inputs, first_call);
}

}  // namespace headroom::detail

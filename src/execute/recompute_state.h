#pragma once

#include <headroom/core/random.h>
#include <headroom/model/chain.h>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Which operations autocast casts, and to what.
class AutocastState {
 public:
  static AutocastState capture();
  bool operator==(const AutocastState& other) const;
  void restore() const;

 private:
  bool cpu_enabled_, cuda_enabled_, cache_enabled_;
  at::ScalarType cpu_dtype_, cuda_dtype_;
  friend class AutocastStateScope;
};

/// Autocast is as `state` says while the scope lives, but caches no cast weights: one that was made
/// for a graph of the moment must not be found by anybody else.
class AutocastStateScope {
 public:
  explicit AutocastStateScope(const AutocastState& state);
  ~AutocastStateScope();
  AutocastStateScope(const AutocastStateScope&) = delete;
  AutocastStateScope& operator=(const AutocastStateScope&) = delete;

 private:
  AutocastState before_;
  bool changed_;
};

/// The training flags of a module and all modules inside; of none when default-constructed.
class TrainingFlags {
 public:
  TrainingFlags() = default;
  explicit TrainingFlags(const torch::nn::Module& module);
  /// Sets the flags and returns what they were.
  TrainingFlags exchange() const;

 private:
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> flags_;
};

/// The flags are as `flags` says while the scope lives.
class TrainingFlagsScope {
 public:
  explicit TrainingFlagsScope(const TrainingFlags& flags) : before_(flags.exchange()) {}
  ~TrainingFlagsScope() { before_.exchange(); }
  TrainingFlagsScope(const TrainingFlagsScope&) = delete;
  TrainingFlagsScope& operator=(const TrainingFlagsScope&) = delete;

 private:
  TrainingFlags before_;
};

/// While the scope lives, in-place operations of this thread on tensors that are older than the
/// scope and do not require grad are noted, and their effect is undone at the end. Knows that batch
/// norm in training writes its running statistics.
class UndoWritesScope {
 public:
  UndoWritesScope();
  ~UndoWritesScope();
  UndoWritesScope(const UndoWritesScope&) = delete;
  UndoWritesScope& operator=(const UndoWritesScope&) = delete;

  /// Throws what went wrong while noting (memory, for one), if anything did.
  void rethrow_failure() const;

 private:
  struct Written {
    at::Tensor tensor;
    at::Tensor value_before;
  };
  static std::unique_ptr<at::ObserverContext> on_operation(const at::RecordFunction& operation);
  void note(const c10::IValue& argument);
  void note(const at::Tensor& tensor);

  UndoWritesScope* outer_;
  at::CallbackHandle callback_;
  std::uint64_t newest_old_allocation_;
  std::vector<Written> written_;
  std::exception_ptr failure_;
};

/// Remembers what a stage's forward depends on besides its inputs, so that a second forward gives
/// the same values and leaves no trace.
class StageState {
 public:
  /// Call right before the first forward. `parameters` are the module's, where the caller knows
  /// them: to ask a module costs more than a small stage.
  static StageState record(const Stage& stage);
  static StageState record(const Stage& stage, const std::vector<at::Tensor>& parameters);

  /// Throws Error, naming the parameter, when one was changed since record().
  void check_parameters(const Stage& stage) const;

  const RandomState& random() const { return random_; }
  /// The bytes of the module's buffers before the first forward, for a stage that depends on them.
  const std::vector<std::string>& buffers() const { return buffers_; }

 private:
  RandomState random_;
  std::vector<std::string> buffers_;
  std::vector<std::uint32_t> parameter_versions_;
};

/// For the lifetime of the scope the random state, and buffers that the stage depends on, are those
/// of the stage's first forward; afterwards random state and buffers (BatchNorm's statistics) are
/// as they were before it.
class RecomputeScope {
 public:
  RecomputeScope(const Stage& stage, const StageState& state);
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;
  RecomputeScope& operator=(const RecomputeScope&) = delete;

 private:
  RandomStateScope random_;
  std::vector<std::pair<at::Tensor, std::string>>
      buffers_;  // with their bytes: copies outside of tensor memory
};

}  // namespace headroom

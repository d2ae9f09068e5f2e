#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <exception>
#include <vector>
#include "memory"

namespace torch::nn {
class Module;
}

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

}  // namespace headroom

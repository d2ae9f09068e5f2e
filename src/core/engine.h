#pragma once

#include <memory>

namespace torch::autograd {
struct SavedVariableHooks;
}

namespace headroom {

/// Makes LibTorch's autograd engine one of ours, which offers saved-tensor hooks and lets go of
/// failed graphs. Cheap to call again, and right at any time outside of a backward on another
/// thread: graphs made before work on. False, and nothing changes, when a foreign engine is in
/// place (Python's, for one).
bool install_engine();

/// Lets go of the graph of a backward that failed on this thread, which LibTorch's engine would
/// keep until the next one.
void release_failed_graph();

/// Gives the hooks of one saved tensor each.
class SavedTensorHookSource {
 public:
  virtual ~SavedTensorHookSource() = default;
  /// Null means: save the next tensor as usual.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// While the scope lives, tensors that autograd saves on this thread go through hooks from
/// `source`; a null source means no hooks. Scopes nest, and the innermost counts. Throws
/// headroom::Error when the engine cannot be installed.
class SavedTensorHookScope {
 public:
  explicit SavedTensorHookScope(SavedTensorHookSource* source);
  ~SavedTensorHookScope();
  SavedTensorHookScope(const SavedTensorHookScope&) = delete;
  SavedTensorHookScope& operator=(const SavedTensorHookScope&) = delete;

 private:
  SavedTensorHookSource* before_;
};

/// What saved tensors go through on this thread now; null for none.
SavedTensorHookSource* current_hook_source();

/// True inside of a backward that was called on this thread with retain_graph or create_graph: what
/// is unpacked may be unpacked again.
bool backward_keeps_graph();

/// Is told when a backward has ended, well or not.
class BackwardListener {
 public:
  virtual ~BackwardListener() = default;
  virtual void backward_ended() noexcept = 0;
};

/// `listener` is told once, when the outermost backward that was called on this thread ends. Does
/// nothing outside of one.
void tell_when_backward_ends(std::weak_ptr<BackwardListener> listener);

}  // namespace headroom

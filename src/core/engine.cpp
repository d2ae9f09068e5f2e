#include "core/engine.h"

#include <headroom/core/error.h>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace headroom {
namespace {

namespace autograd = torch::autograd;

thread_local SavedTensorHookSource* hook_source = nullptr;
thread_local int backward_depth = 0;

struct BackwardDepth {
  BackwardDepth() { ++backward_depth; }
  ~BackwardDepth() { --backward_depth; }
  BackwardDepth(const BackwardDepth&) = delete;
  BackwardDepth& operator=(const BackwardDepth&) = delete;
};

// One call of backward() on this thread.
class BackwardCall {
 public:
  explicit BackwardCall(bool keeps_graph) : outer_(current), keeps_graph_(keeps_graph) {
    current = this;
  }
  ~BackwardCall() {
    current = outer_;
    for (const std::weak_ptr<BackwardListener>& weak : listeners_) {
      if (const std::shared_ptr<BackwardListener> listener = weak.lock())
        listener->backward_ended();
    }
  }
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;

  bool keeps_graph() const { return keeps_graph_; }
  void add_listener(std::weak_ptr<BackwardListener> listener) {
    BackwardCall* call = this;
    while (call->outer_) call = call->outer_;
    call->listeners_.push_back(std::move(listener));
  }

  static thread_local BackwardCall* current;

 private:
  BackwardCall* outer_;
  bool keeps_graph_;
  std::vector<std::weak_ptr<BackwardListener>> listeners_;
};
thread_local BackwardCall* BackwardCall::current = nullptr;

class HookEngine final : public autograd::Engine {
 public:
  HookEngine() = default;
  ~HookEngine() override { stop(); }

  static autograd::Engine& get() { return instance(); }
  static HookEngine& instance() {
    static HookEngine engine;
    return engine;
  }

  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return hook_source ? hook_source->make_hooks() : nullptr;
  }

  autograd::variable_list execute(const autograd::edge_list& roots,
                                  const autograd::variable_list& inputs, bool keep_graph,
                                  bool create_graph, bool accumulate_grad,
                                  const autograd::edge_list& outputs) override {
    try {
      const BackwardDepth depth;
      const BackwardCall call(keep_graph);
      return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    } catch (...) {
      release_failed();
      throw;
    }
  }

  // The base engine leaves the tasks that a failed backward did not get to in this thread's ready
  // queue, where they pin the graph.
  void release_failed() {
    if (backward_depth == 0) init_local_ready_queue(std::make_shared<autograd::ReadyQueue>());
  }

 protected:
  // Deeply nested backwards run on threads of the engine's pool, which start here.
  void thread_main(const std::shared_ptr<autograd::GraphTask>& task) override {
    const BackwardDepth depth;
    Engine::thread_main(task);
  }
};

}  // namespace

bool install_engine() {
  autograd::Engine* current = &autograd::Engine::get_default_engine();
  if (current == &HookEngine::instance()) return true;
  if (current != &autograd::Engine::get_base_engine()) return false;
  autograd::set_default_engine_stub(&HookEngine::get);
  return true;
}

SavedTensorHookScope::SavedTensorHookScope(SavedTensorHookSource* source) : before_(hook_source) {
  if (source && !install_engine()) {
    throw Error(ExitCode::kInternal,
                "another autograd engine is in place (this process runs Python?): saved-tensor "
                "hooks need the engine of LibTorch itself");
  }
  hook_source = source;
}

SavedTensorHookScope::~SavedTensorHookScope() { hook_source = before_; }

SavedTensorHookSource* current_hook_source() { return hook_source; }

bool backward_keeps_graph() {
  return BackwardCall::current && BackwardCall::current->keeps_graph();
}

void tell_when_backward_ends(std::weak_ptr<BackwardListener> listener) {
  if (BackwardCall::current) BackwardCall::current->add_listener(std::move(listener));
}

void release_failed_graph() {
  if (install_engine()) HookEngine::instance().release_failed();
}

}  // namespace headroom

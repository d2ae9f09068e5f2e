#pragma once

#include <headroom/core/error.h>
#include <headroom/execute/tensor_visit.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

namespace headroom {

struct CheckpointOptions {
  /// Says in errors which checkpoint it was; without one, the type of the callable does.
  std::string name;
  /// Compares what the recomputation saves with what forward saved, bit for bit, and their number.
  /// Costs time, no memory.
  bool check_values = false;
  /// Whether the recomputation sees the random numbers of the first forward. False only for code
  /// that draws none.
  bool preserve_random_state = true;
};

/// What forward and recomputation did differs, or something that fn depends on was changed in
/// between: gradients would be wrong.
class CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& message) : Error(ExitCode::kInternal, message) {}
};

namespace detail {

/// What is called, for errors and for its training flags; `module` is null for plain callables.
struct Callee {
  const std::type_info* type;
  std::shared_ptr<torch::nn::Module> module;
};

using Recompute = std::function<void(const std::vector<at::Tensor>& inputs)>;
/// Calls fn for the first time and gives the tensors of its result.
using FirstCall = std::function<std::vector<at::Tensor>()>;

void run_checkpointed(const CheckpointOptions& options, Callee callee,
                      std::vector<at::Tensor> inputs, Recompute recompute,
                      const FirstCall& first_call);

template <typename T>
struct IsSharedModule : std::false_type {};
template <typename M>
struct IsSharedModule<std::shared_ptr<M>> : std::is_base_of<torch::nn::Module, M> {};

template <typename Fn>
inline constexpr bool kIsModulePointer =
    std::is_base_of_v<torch::detail::ModuleHolderIndicator, std::decay_t<Fn>> ||
    IsSharedModule<std::decay_t<Fn>>::value;

template <typename Fn, typename... Args>
decltype(auto) call(Fn& fn, Args&&... args) {
  if constexpr (kIsModulePointer<Fn>) {
    return fn->forward(std::forward<Args>(args)...);
  } else if constexpr (std::is_same_v<std::decay_t<Fn>, torch::nn::AnyModule>) {
    return fn.forward(std::forward<Args>(args)...);
  } else {
    return std::invoke(fn, std::forward<Args>(args)...);
  }
}

template <typename Fn>
std::shared_ptr<torch::nn::Module> module_of(const Fn& fn) {
  if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator, Fn> ||
                std::is_same_v<Fn, torch::nn::AnyModule>) {
    return fn.ptr();
  } else if constexpr (IsSharedModule<Fn>::value) {
    return fn;
  } else {
    return nullptr;
  }
}

// As the caller passed it: fn may take its argument by lvalue reference.
template <typename Arg, typename KeptArg>
decltype(auto) pass_as(KeptArg& kept) {
  if constexpr (std::is_lvalue_reference_v<Arg>) {
    return (kept);
  } else {
    return std::move(kept);
  }
}

}  // namespace detail

/// Calls fn(args...) and returns what it returns, but keeps for backward only the tensors in
/// `args`; what fn's operations would have saved is recomputed, by calling fn once more, when
/// backward first needs it. Losses, gradients, buffers and the random stream are bit-identical to a
/// plain call.
///
/// fn is any callable, or a module: its holder, a shared_ptr to it, or an AnyModule. Tensors may be
/// anywhere in the arguments and in the result (tensor_visit.h), undefined or without grad; other
/// arguments are copied and passed through unchanged. fn and its copies of arguments live as long
/// as the graph: what fn captures by reference must live until backward is done.
///
/// - Works with backward, autograd::grad, retain_graph, create_graph (double backward), nested
///   checkpoints, KeepAs scopes inside and outside, and with inputs of which none requires grad.
///   Without grad mode it is a plain call.
/// - The recomputation stops as soon as the last tensor that is still needed is there; each is
///   freed when it has been used.
/// - The recomputation has the random state of the default generators (not that of a generator that
///   fn holds itself), the autocast state and, when fn is a module, the training flags of its
///   submodules from the first call.
/// - The recomputation leaves no trace: what it writes in place to tensors that are older than
///   itself and do not require grad (running statistics of batch and instance norm, counters) is
///   undone. Writes by out= functions or through raw pointers are not seen. State that also changes
///   fn's result from call to call (spectral norm) is not rewound: `check_values` finds such.
/// - Backward throws CheckpointError when an input or a parameter was changed in place after
///   forward, or when the recomputation saves fewer tensors, or tensors of other shapes or dtypes.
///   What fn throws in the recomputation leaves backward unchanged in type.
///
/// Installs the MemoryMeter, by which it tells old tensors from new ones.
template <typename Fn, typename... Args>
auto checkpoint(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  using KeptFn = std::decay_t<Fn>;
  static_assert(!std::is_base_of_v<torch::nn::Module, KeptFn>,
                "pass the module's holder or a shared_ptr to it: checkpoint calls it again later");
  using Result = std::decay_t<decltype(detail::call(fn, std::forward<Args>(args)...))>;
  if (!c10::GradMode::is_enabled())
    return static_cast<Result>(detail::call(fn, std::forward<Args>(args)...));

  std::vector<at::Tensor> inputs;
  std::tuple<detail::KeptType<Args>...> kept(detail::keep(args)...);
  detail::each_tensor(
      kept, [&](at::Tensor& tensor) { inputs.push_back(std::exchange(tensor, at::Tensor())); });
  const KeptFn& callee = fn;
  auto recompute = [fn = KeptFn(fn),
                    kept = std::move(kept)](const std::vector<at::Tensor>& tensors) mutable {
    auto filled = kept;
    auto next = tensors.begin();
    detail::each_tensor(filled, [&](at::Tensor& tensor) { tensor = *next++; });
    std::apply(
        [&](auto&... arg) { static_cast<void>(detail::call(fn, detail::pass_as<Args>(arg)...)); },
        filled);
  };
  const detail::Callee about{&typeid(KeptFn), detail::module_of(callee)};
  if constexpr (std::is_void_v<Result>) {
    detail::run_checkpointed(options, about, std::move(inputs), std::move(recompute), [&] {
      detail::call(fn, std::forward<Args>(args)...);
      return std::vector<at::Tensor>();
    });
  } else {
    std::optional<Result> result;
    detail::run_checkpointed(options, about, std::move(inputs), std::move(recompute), [&] {
      result.emplace(detail::call(fn, std::forward<Args>(args)...));
      std::vector<at::Tensor> outputs;
      detail::each_tensor(*result, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
      return outputs;
    });
    return std::move(*result);
  }
}

template <typename Fn, typename... Args,
          typename = std::enable_if_t<!std::is_same_v<std::decay_t<Fn>, CheckpointOptions>>>
auto checkpoint(Fn&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions(), std::forward<Fn>(fn), std::forward<Args>(args)...);
}

}  // namespace headroom

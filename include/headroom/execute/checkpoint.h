#pragma once

#include <headroom/core/error.h>
#include <headroom/execute/tensor_visit.h>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <torch/nn/modules/container/sequential.h>
#include <cstdint>
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

/// Layers [begin, end) of a Sequential that are checkpointed as one; inside, `inner` segments
/// again, or nothing.
struct CheckpointSegment {
  std::size_t begin;
  std::size_t end;
  bool is_checkpointed = true;
  std::vector<CheckpointSegment> inner;
};

/// Which layers of a chain to checkpoint together. For n equal layers of which one keeps `a` bytes,
/// `b` of them its input:
///
/// | strategy   | peak                          | extra forwards |
/// | every      | n b + a                       | 1              |
/// | segments K | K b + a n / K                 | 1              |
/// | sqrt       | as segments, with K = sqrt(n) | 1              |
/// | log        | b log2(n) + a                 | log2(n)        |
class CheckpointStrategy {
 public:
  /// `num_segments` segments of equal length, as far as that goes; more than there are layers means
  /// one per layer. Throws ConfigError below 1.
  CheckpointStrategy(std::int64_t num_segments);  // NOLINT(google-explicit-constructor)
  CheckpointStrategy(int num_segments)
      : CheckpointStrategy(std::int64_t{num_segments}) {}  // NOLINT(google-explicit-constructor)
  /// A segment begins at each cut point, and at layer 0. They must increase and lie inside of the
  /// chain: segments() throws ConfigError.
  CheckpointStrategy(std::vector<std::int64_t> cut_points);  // NOLINT(google-explicit-constructor)

  static CheckpointStrategy every();
  static CheckpointStrategy sqrt();
  /// Halves, checkpointed inside of halves, down to single layers.
  static CheckpointStrategy log();

  /// Without its last segment checkpointed a chain needs less time, and no more memory where
  /// backward follows at once.
  CheckpointStrategy& checkpoint_last(bool on);

  std::vector<CheckpointSegment> segments(std::size_t num_layers) const;

 private:
  enum class Kind { kEvery, kCount, kCuts, kSqrt, kLog };
  explicit CheckpointStrategy(Kind kind) : kind_(kind) {}

  Kind kind_;
  std::int64_t num_segments_ = 0;
  std::vector<std::int64_t> cut_points_;
  bool checkpoint_last_ = true;
};

namespace detail {

std::string segment_name(const CheckpointSegment& segment);

using SharedSequential = std::shared_ptr<torch::nn::SequentialImpl>;

template <typename... Inputs>
torch::nn::AnyValue run_segments(const SharedSequential& layers,
                                 const std::vector<CheckpointSegment>& segments, Inputs... inputs);

template <typename... Inputs>
torch::nn::AnyValue run_segment(const SharedSequential& layers, const CheckpointSegment& segment,
                                Inputs... inputs) {
  if (!segment.inner.empty()) return run_segments(layers, segment.inner, std::move(inputs)...);
  auto layer = layers->begin() + static_cast<std::ptrdiff_t>(segment.begin);
  torch::nn::AnyValue value = layer->any_forward(std::move(inputs)...);
  for (std::size_t i = segment.begin + 1; i < segment.end; ++i)
    value = (++layer)->any_forward(std::move(value));
  return value;
}

template <typename... Inputs>
torch::nn::AnyValue run_maybe_checkpointed(const SharedSequential& layers,
                                           const CheckpointSegment& segment, Inputs... inputs) {
  if (!segment.is_checkpointed) return run_segment(layers, segment, std::move(inputs)...);
  CheckpointOptions options;
  options.name = segment_name(segment);
  const auto run = [layers, segment](Inputs... again) {
    return run_segment(layers, segment, std::move(again)...);
  };
  return checkpoint(options, run, std::move(inputs)...);
}

// The first segment takes what the caller passes, each other one what the segment before returned.
template <typename... Inputs>
torch::nn::AnyValue run_segments(const SharedSequential& layers,
                                 const std::vector<CheckpointSegment>& segments, Inputs... inputs) {
  torch::nn::AnyValue value =
      run_maybe_checkpointed(layers, segments.front(), std::move(inputs)...);
  for (std::size_t i = 1; i < segments.size(); ++i)
    value = run_maybe_checkpointed(layers, segments[i], std::move(value));
  return value;
}

}  // namespace detail

/// sequential->forward(inputs...) with its layers checkpointed in segments:
///
///     y = headroom::checkpoint_sequential(sequential, 4, x);
///     y = headroom::checkpoint_sequential(sequential, headroom::CheckpointStrategy::sqrt(), x);
///
/// Layers may hand on tuples or vectors of tensors. `Result` is what the last layer returns. Throws
/// ConfigError for an empty Sequential.
template <typename Result = at::Tensor, typename... Inputs>
Result checkpoint_sequential(const torch::nn::Sequential& sequential,
                             const CheckpointStrategy& strategy, Inputs&&... inputs) {
  const std::vector<CheckpointSegment> segments = strategy.segments(sequential->size());
  return detail::run_segments<std::decay_t<Inputs>...>(sequential.ptr(), segments,
                                                       std::forward<Inputs>(inputs)...)
      .template get<Result>();
}

}  // namespace headroom

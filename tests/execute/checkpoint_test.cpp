// What checkpoint promises beyond identical numbers. The names follow the ways in which other
// implementations fail.
#include <headroom/execute/checkpoint.h>

#include "core/torch_compat.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function_hook.h>

#include <atomic>
#include <thread>

#include "execute/checkpoint_support.h"
#include "support/message_of.h"

namespace headroom {
namespace {

using namespace torch::nn;  // NOLINT(google-build-using-namespace): the test reads as a list of
                            // LibTorch models
using testing::clear_gradients;
using testing::expect_identical;
using testing::expect_same_bits;
using testing::message_of;
using testing::peak_of;
using testing::run_step;
using testing::TransformerBlock;
using torch::Tensor;
using torch::autograd::grad;

// Counts how often it is called.
struct Counted {
  std::shared_ptr<int> num_calls = std::make_shared<int>(0);
  Tensor operator()(const Tensor& x) const {
    ++*num_calls;
    return torch::tanh(x * x).sin();
  }
};

TEST(CheckpointTest, RecomputesOnceAndOnlyInBackward) {
  const Counted fn;
  const Tensor x = torch::randn({3}).requires_grad_();
  const Tensor y = checkpoint(fn, x);
  EXPECT_EQ(*fn.num_calls, 1);
  y.sum().backward();
  EXPECT_EQ(*fn.num_calls, 2);
}

TEST(CheckpointTest, NoGradIsAPlainCall) {
  const Counted fn;
  const Tensor x = torch::randn({1000}).requires_grad_();
  const torch::NoGradGuard no_grad;
  Tensor plain, y;
  const std::int64_t plain_peak = peak_of([&] { plain = Counted()(x); });
  EXPECT_EQ(peak_of([&] { y = checkpoint(fn, x); }), plain_peak);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(*fn.num_calls, 1);
  EXPECT_TRUE(torch::equal(y, plain));
}

TEST(CheckpointTest, EvaluationModeNeedsNoRecompute) {
  Sequential model(Linear(4, 4), Dropout(0.5), BatchNorm1d(4));
  model->eval();
  for (Tensor& parameter : model->parameters()) parameter.set_requires_grad(false);
  const Tensor x = torch::randn({5, 4});
  const Tensor y = checkpoint(model, x);
  EXPECT_FALSE(y.requires_grad());
  EXPECT_TRUE(torch::equal(y, model->forward(x)));
}

TEST(CheckpointTest, ParametersGetGradientsThoughNoInputRequiresGrad) {
  Linear linear(4, 4);
  const Tensor x = torch::randn({2, 4});
  checkpoint([&](const Tensor& in) { return torch::tanh(linear(in)); }, x).sum().backward();
  ASSERT_TRUE(linear->weight.grad().defined());
  EXPECT_GT(linear->weight.grad().abs().sum().item<double>(), 0);
}

TEST(CheckpointTest, ArgumentsAndResultsOfAllKinds) {
  const Tensor a = torch::randn({3, 4}).requires_grad_(), b = torch::randn({4}).requires_grad_(),
               mask = torch::rand({3, 4}) > 0.5;
  struct Scale {
    double value;
  };
  const auto fn = [](std::vector<Tensor> list, int power, const Tensor& where,
                     const c10::optional<Tensor>& bias, Scale scale, const std::string& mode,
                     const Tensor& undefined) {
    EXPECT_EQ(mode, "tanh");
    EXPECT_FALSE(undefined.defined());
    const Tensor y =
        torch::tanh(list[0].pow(power) * list[1] * scale.value).masked_fill(where, 0.0) +
        bias.value();
    return std::make_tuple(y.sin(), y.argmax(-1), std::vector<Tensor>{y.exp(), y.detach()},
                           Tensor(), 17);
  };
  const auto run = [&](bool checkpointed) {
    const std::vector<Tensor> list = {a, b};
    const c10::optional<Tensor> bias(b);
    auto result = checkpointed ? checkpoint(fn, list, 2, mask, bias, Scale{0.5},
                                            std::string("tanh"), Tensor())
                               : fn(list, 2, mask, bias, Scale{0.5}, "tanh", Tensor());
    EXPECT_EQ(std::get<4>(result), 17);
    EXPECT_FALSE(std::get<3>(result).defined());
    EXPECT_FALSE(std::get<1>(result).requires_grad());
    EXPECT_FALSE(std::get<2>(result)[1].requires_grad());
    return grad({std::get<0>(result).sum() + std::get<2>(result)[0].pow(2).sum()}, {a, b});
  };
  const std::vector<Tensor> plain = run(false), checkpointed = run(true);
  expect_same_bits(checkpointed[0], plain[0], "a");
  expect_same_bits(checkpointed[1], plain[1], "b");
}

TEST(CheckpointTest, ListsThatOnlyViewTheirTensorsAreKept) {
  const Tensor x = torch::randn({3}).requires_grad_();
  const auto fn = [](at::TensorList in) { return torch::tanh(in[0]) * in[1].exp(); };
  Tensor y, plain;
  {
    const std::vector<Tensor> list = {x, x.detach()};
    y = checkpoint(fn, at::TensorList(list));
    plain = grad({fn(list).sum()}, {x})[0];
  }
  expect_same_bits(grad({y.sum()}, {x})[0], plain, "x");
}

TEST(CheckpointTest, ModulesAsHolderPointerAndAny) {
  Linear linear(3, 3);
  const Tensor x = torch::randn({2, 3}).requires_grad_();
  const Tensor expected = linear(x);
  EXPECT_TRUE(torch::equal(checkpoint(linear, x), expected));
  EXPECT_TRUE(torch::equal(checkpoint(linear.ptr(), x), expected));
  AnyModule any(linear);
  EXPECT_TRUE(torch::equal(checkpoint(any, x), expected));
}

TEST(CheckpointTest, SeveralBackwardsThroughOneGraph) {
  const Counted fn;
  const Tensor x = torch::randn({4}).requires_grad_();
  const Tensor loss = checkpoint(fn, x).sum();
  const Tensor once = grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
  const Tensor twice = grad({loss}, {x}, {}, /*retain_graph=*/true)[0];
  loss.backward();
  EXPECT_EQ(*fn.num_calls, 4);
  expect_same_bits(twice, once, "second");
  expect_same_bits(x.grad(), once, "third");
  EXPECT_THROW(loss.backward(), c10::Error) << "as in LibTorch, the graph is gone";
}

TEST(CheckpointTest, DoubleBackward) {
  Linear linear(4, 4);
  const Tensor x = torch::randn({2, 4}).requires_grad_();
  const auto fn = [&](const Tensor& in) { return torch::tanh(linear(in)).pow(3); };
  const auto penalty = [&](const Tensor& y) {
    clear_gradients(*linear);
    grad({y.sum()}, {x}, {}, true, /*create_graph=*/true)[0].pow(2).sum().backward();
    return linear->weight.grad();
  };
  const Tensor plain = penalty(fn(x));
  expect_same_bits(penalty(checkpoint(fn, x)), plain, "second derivative");
}

TEST(CheckpointTest, FnMayGoBackwardItself) {
  const auto energy_force = [](const Tensor& in) {
    const Tensor leaf = in * 1.0;
    const Tensor energy = leaf.pow(3).sin().sum();
    return grad({energy}, {leaf}, {}, true, /*create_graph=*/true)[0];
  };
  const Tensor x = torch::randn({5}).requires_grad_();
  const Tensor plain = grad({energy_force(x).pow(2).sum()}, {x})[0];
  expect_same_bits(grad({checkpoint(energy_force, x).pow(2).sum()}, {x})[0], plain,
                   "gradient of a force");
}

TEST(CheckpointTest, EveryParameterIsReadyOncePerBackward) {
  struct CountingHook : torch::autograd::FunctionPostHook {
    explicit CountingHook(int* count) : count_(count) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      ++*count_;
      return outputs;
    }
    int* count_;
  };
  Linear linear(4, 4);
  int num_ready = 0;
  const auto accumulator = torch::autograd::impl::grad_accumulator(linear->weight);
  accumulator->add_post_hook(std::make_unique<CountingHook>(&num_ready));
  const auto inner = [&](const Tensor& in) { return torch::tanh(linear(in)); };
  const auto outer = [&](const Tensor& in) { return checkpoint(inner, checkpoint(inner, in)); };
  checkpoint(outer, checkpoint(outer, torch::randn({2, 4}))).sum().backward();
  EXPECT_EQ(num_ready, 1);
}

TEST(CheckpointTest, AutocastIsAsInForward) {
  Linear linear(8, 8);
  const Tensor x = torch::randn({4, 8}).requires_grad_();
  const auto run = [&](bool checkpointed) {
    HEADROOM_AUTOCAST_SET_CPU_ENABLED(true);
    const auto fn = [&](const Tensor& in) { return torch::tanh(linear(torch::tanh(linear(in)))); };
    const Tensor y = checkpointed ? checkpoint(fn, x) : fn(x);
    HEADROOM_AUTOCAST_SET_CPU_ENABLED(false);
    at::autocast::clear_cache();
    EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
    std::vector<Tensor> gradients = grad({y.sum()}, {x, linear->weight});
    EXPECT_FALSE(HEADROOM_AUTOCAST_CPU_ENABLED());
    return gradients;
  };
  const std::vector<Tensor> plain = run(false), checkpointed = run(true);
  expect_same_bits(checkpointed[0], plain[0], "x");
  expect_same_bits(checkpointed[1], plain[1], "weight");
}

TEST(CheckpointTest, TrainingFlagIsAsInForward) {
  Sequential model(Linear(4, 4), Dropout(0.5), Tanh());
  const auto run = [&](bool checkpointed) {
    model->train();
    return run_step(*model, {}, [&] {
      const Tensor x = torch::ones({3, 4});
      const Tensor y = checkpointed ? checkpoint(model, x) : model->forward(x);
      model->eval();
      return y.sum();
    });
  };
  const auto plain = run(false);
  expect_identical(run(true), plain);
  EXPECT_FALSE(model->is_training()) << "what the caller set stays set";
  EXPECT_FALSE(model->children()[1]->is_training());
}

TEST(CheckpointTest, CountersThatFnKeepsCountOnce) {
  const Tensor counter = torch::zeros({}, torch::kLong), history = torch::zeros({4});
  const Tensor x = torch::randn({4}).requires_grad_();
  const auto fn = [&](const Tensor& in) {
    counter.add_(1);
    history.slice(0, 0, 2).mul_(0.9).add_(in.detach().slice(0, 0, 2));
    return torch::tanh(torch::dropout(in, 0.5, true)).exp();
  };
  Tensor expected;
  {
    const Tensor y = checkpoint(fn, x);
    expected = history.clone();
    y.sum().backward();
  }
  EXPECT_EQ(counter.item<std::int64_t>(), 1);
  EXPECT_TRUE(torch::equal(history, expected));
}

TEST(CheckpointTest, ChangedParameterIsNamed) {
  Sequential model(Linear(4, 4), Tanh(), Linear(4, 4), Tanh());
  for (const char* name : {"2.weight", "0.bias"}) {
    const Tensor y = checkpoint(model, torch::randn({2, 4}));
    {
      const torch::NoGradGuard no_grad;
      model->named_parameters()[name].mul_(0.9);
    }
    const std::string message = message_of<CheckpointError>([&] { y.sum().backward(); });
    EXPECT_NE(message.find(name), std::string::npos) << message;
    EXPECT_NE(message.find("changed in place between forward and backward"), std::string::npos)
        << message;
  }
  checkpoint(model, torch::randn({2, 4})).sum().backward();
}

TEST(CheckpointTest, ChangedInputIsNamed) {
  const Tensor x = torch::randn({3}).requires_grad_(), scale = torch::ones({3});
  const Tensor y =
      checkpoint([](const Tensor& in, const Tensor& s) { return torch::tanh(in * s); }, x, scale);
  scale.add_(1);
  const std::string message = message_of<CheckpointError>([&] { y.sum().backward(); });
  EXPECT_NE(message.find("tensor 1 of its arguments"), std::string::npos) << message;
}

TEST(CheckpointTest, ChangedConstantIsAnError) {
  const Tensor x = torch::randn({3}).requires_grad_(), scale = torch::ones({3});
  const Tensor y = checkpoint([&](const Tensor& in) { return torch::tanh(in * scale); }, x);
  scale.add_(1);
  EXPECT_NE(message_of<CheckpointError>([&] { y.sum().backward(); }).find("changed in place"),
            std::string::npos);
}

TEST(CheckpointTest, OtherShapesCountsAndDtypesAreErrorsThatNameThePlace) {
  const Tensor x = torch::randn({4, 4}).requires_grad_();
  CheckpointOptions options;
  options.name = "block 3";
  int num_calls = 0;
  const std::vector<std::function<Tensor(const Tensor&)>> fns = {
      [&](const Tensor& in) { return (++num_calls % 2 ? in : in.slice(0, 0, 2)).tanh().sum(); },
      [&](const Tensor& in) { return (++num_calls % 2 ? in : in.to(torch::kDouble)).tanh().sum(); },
      [&](const Tensor& in) { return ++num_calls % 2 ? in.tanh().tanh().sum() : in.tanh().sum(); },
  };
  for (const auto& fn : fns) {
    num_calls = 0;
    const std::string message =
        message_of<CheckpointError>([&] { checkpoint(options, fn, x).backward(); });
    EXPECT_NE(message.find("checkpoint 'block 3'"), std::string::npos) << message;
  }
}

TEST(CheckpointTest, CheckValuesFindsOtherValuesAndMoreTensors) {
  const Tensor x = torch::randn({4}).requires_grad_();
  CheckpointOptions options;
  options.name = "head";
  options.check_values = true;
  double scale = 1;
  const auto drifting = [&](const Tensor& in) { return torch::tanh(in * (scale += 1e-3)); };
  EXPECT_NE(message_of<CheckpointError>([&] {
              checkpoint(options, drifting, x).sum().backward();
            }).find("checkpoint 'head'"),
            std::string::npos);
  int num_calls = 0;
  const auto growing = [&](const Tensor& in) {
    return ++num_calls == 1 ? in.tanh() : in.tanh().tanh();
  };
  EXPECT_NE(message_of<CheckpointError>([&] {
              checkpoint(options, growing, x).sum().backward();
            }).find("saved 2 tensors, forward saved 1"),
            std::string::npos);
  TransformerBlock block(16, 4, 0.1);
  checkpoint(options, block, torch::randn({2, 3, 16})).sum().backward();
}

TEST(CheckpointTest, ExceptionInTheRecomputeReachesTheCallerAndTheNextStepWorks) {
  MemoryMeter& meter = MemoryMeter::instance();
  struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  TransformerBlock block(16, 4, 0.1);
  const Tensor x = torch::randn({2, 3, 16});
  bool is_broken = false;
  const auto fn = [&](const Tensor& in) {
    const Tensor y = block->forward(in);
    if (is_broken) throw Broken("in fn");
    return torch::tanh(y);
  };
  const std::int64_t live = meter.live_bytes();
  for (int i = 0; i < 3; ++i) {
    is_broken = false;
    Tensor loss = checkpoint(fn, x).sum() + checkpoint(fn, x).sum();
    is_broken = true;
    EXPECT_THROW(loss.backward(), Broken);
    loss = Tensor();
    clear_gradients(*block);
    EXPECT_EQ(meter.live_bytes(), live);
  }
  is_broken = false;
  checkpoint(fn, x).sum().backward();
  clear_gradients(*block);
  EXPECT_EQ(meter.live_bytes(), live);
}

TEST(CheckpointTest, OutOfBudgetInTheRecomputeLeavesNothingBehind) {
  MemoryMeter& meter = MemoryMeter::instance();
  TransformerBlock a(32, 4, 0.1), b(32, 4, 0.1);
  const Tensor x = torch::randn({4, 16, 32});
  const auto step = [&] {
    checkpoint(b, checkpoint(a, x)).pow(2).sum().backward();
    clear_gradients(*a), clear_gradients(*b);
  };
  step();
  const std::int64_t live = meter.live_bytes(), needed = peak_of(step);
  EXPECT_EQ(meter.live_bytes(), live);
  for (std::int64_t cap = needed / 60; cap < needed; cap += needed / 60) {
    meter.set_cap(live + cap);
    EXPECT_THROW(step(), OutOfBudget);
    meter.set_cap(0);
    clear_gradients(*a), clear_gradients(*b);
    ASSERT_EQ(meter.live_bytes(), live) << "cap " << cap;
  }
  meter.set_cap(live + needed);
  step();
  meter.set_cap(0);
}

TEST(CheckpointTest, ViewsAndInPlaceOperationsInside) {
  Linear linear(6, 6);
  const Tensor x = torch::randn({4, 6}).requires_grad_();
  const auto fn = [&](const Tensor& in) {
    Tensor y = linear(in);
    y.relu_();
    y = y * in;
    y.slice(0, 0, 2).mul_(2.0);
    y = y.view({2, 12}).transpose(0, 1);
    y[0].add_(1.0);
    return y.reshape({4, 6}) * in;
  };
  const auto plain = run_step(*linear, {x}, [&] { return fn(x).pow(2).sum(); });
  expect_identical(run_step(*linear, {x}, [&] { return checkpoint(fn, x).pow(2).sum(); }), plain);
}

TEST(CheckpointTest, InPlaceChangeOfTheOutput) {
  const Tensor x = torch::randn({4}).requires_grad_();
  const auto fn = [](const Tensor& in) { return (in * 2).relu() + 1; };
  const Tensor plain = grad({fn(x).mul_(3).sigmoid_().sum()}, {x})[0];
  expect_same_bits(grad({checkpoint(fn, x).mul_(3).sigmoid_().sum()}, {x})[0], plain, "x");
  // Here the last operation saved the output itself. LibTorch refuses; the recomputation makes it
  // anew.
  const auto saves_output = [](const Tensor& in) { return in.tanh(); };
  EXPECT_THROW(grad({saves_output(x).mul_(3).sum()}, {x}), c10::Error);
  expect_same_bits(grad({checkpoint(saves_output, x).mul_(3).sum()}, {x})[0],
                   grad({(x.tanh() * 3).sum()}, {x})[0], "x");
}

TEST(CheckpointTest, ViewOfTheInputAsOutput) {
  const Tensor x = torch::randn({2, 3}).requires_grad_();
  const auto fn = [](const Tensor& in) { return std::make_pair(in.t(), in.exp()); };
  const auto product = [](const std::pair<Tensor, Tensor>& both) {
    return (both.first * both.second.t()).sum();
  };
  expect_same_bits(grad({product(checkpoint(fn, x))}, {x})[0], grad({product(fn(x))}, {x})[0], "x");
}

TEST(CheckpointTest, ChangeOfASavedTensorInsideIsAnError) {
  const Tensor x = torch::randn({4}).requires_grad_();
  const auto fn = [](const Tensor& in) {
    Tensor y = in.tanh();
    y.mul_(2.0);
    return y.exp();
  };
  EXPECT_NE(message_of<CheckpointError>([&] {
              checkpoint(fn, x).sum().backward();
            }).find("was changed in place after it was saved"),
            std::string::npos);
}

TEST(CheckpointTest, FnThatChangesItsInputIsAnError) {
  const Tensor x = torch::randn({4}).requires_grad_();
  const auto fn = [](Tensor in) { return in.mul_(2.0).tanh(); };
  EXPECT_NE(message_of<CheckpointError>([&] {
              checkpoint(fn, x * 1.0).sum().backward();
            }).find("or by forward itself"),
            std::string::npos);
}

struct Doubled : torch::autograd::Function<Doubled> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x, x.exp()});
    return x.exp() * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[1] * 2};
  }
};

TEST(CheckpointTest, CustomFunctionsAndEarlyStopLeakNothing) {
  MemoryMeter& meter = MemoryMeter::instance();
  const Tensor x = torch::randn({100}).requires_grad_();
  const auto fn = [](const Tensor& in) { return Doubled::apply(in.tanh()).sin() + 1; };
  const Tensor plain = grad({fn(x).sum()}, {x})[0];
  const std::int64_t live = meter.live_bytes();
  for (int i = 0; i < 20; ++i) {
    expect_same_bits(grad({checkpoint(fn, x).sum()}, {x})[0], plain, "x");
    checkpoint(fn, x);  // never went backward
  }
  EXPECT_EQ(meter.live_bytes(), live);
}

TEST(CheckpointTest, APartialBackwardKeepsNothingOfTheRecompute) {
  MemoryMeter& meter = MemoryMeter::instance();
  const Tensor a = torch::randn({1000}).requires_grad_(), b = torch::randn({1000}).requires_grad_();
  const auto fn = [](const Tensor& first, const Tensor& second) {
    return std::make_pair(first.tanh().tanh().tanh(), second.exp().sin().tanh());
  };
  const auto outputs = checkpoint(fn, a, b);
  const std::int64_t live = meter.live_bytes();
  { const Tensor gradient = grad({outputs.first.sum()}, {a}, {}, /*retain_graph=*/true)[0]; }
  EXPECT_EQ(meter.live_bytes(), live);
  grad({outputs.first.sum()}, {a});
  EXPECT_LE(meter.live_bytes(), live);
}

TEST(CheckpointTest, LiveBytesReturnInAThousandRepetitions) {
  MemoryMeter& meter = MemoryMeter::instance();
  TransformerBlock block(16, 4, 0.1);
  const Tensor x = torch::randn({2, 4, 16}).requires_grad_();
  const auto outer = [&](const Tensor& in) {
    return checkpoint(block, torch::tanh(checkpoint(block, in)));
  };
  const std::int64_t live = meter.live_bytes();
  for (int i = 0; i < 1000; ++i) {
    checkpoint(outer, x).sum().backward();
    clear_gradients(*block);
    x.mutable_grad() = Tensor();
    ASSERT_EQ(meter.live_bytes(), live) << "repetition " << i;
  }
}

TEST(CheckpointTest, RecomputeStopsAtTheLastTensorThatIsNeeded) {
  const auto tail_calls = std::make_shared<int>(0);
  const auto fn = [tail_calls](const Tensor& in) {
    const Tensor y = torch::tanh(in);
    const Tensor z = y + 1;  // saves nothing
    ++*tail_calls;
    return z;
  };
  const Tensor x = torch::randn({3}).requires_grad_();
  checkpoint(fn, x).sum().backward();
  EXPECT_EQ(*tail_calls, 1) << "the recomputation stopped before";
}

TEST(CheckpointTest, TensorsOfTheRecomputeAreFreedAsSoonAsUsed) {
  // Twenty tanh keep twenty outputs; backward frees one and makes one gradient at a time, so that
  // the peak is the recomputation alone.
  constexpr std::int64_t kBytes = 4 * 10000;
  const Tensor x = torch::randn({10000}).requires_grad_();
  const auto fn = [](Tensor y) {
    for (int i = 0; i < 20; ++i) y = torch::tanh(y);
    return y;
  };
  const std::int64_t peak = peak_of([&] { checkpoint(fn, x).sum().backward(); });
  EXPECT_LE(peak, 24 * kBytes);
  x.mutable_grad() = Tensor();
  const Tensor y = checkpoint(fn, x);
  const std::int64_t live = MemoryMeter::instance().live_bytes();
  y.sum().backward({}, /*retain_graph=*/true);
  x.mutable_grad() = Tensor();
  EXPECT_LE(MemoryMeter::instance().live_bytes(), live)
      << "retain_graph retains the graph, not the recomputation";
}

TEST(CheckpointTest, EveryBlockOfATransformerSavesSeventyPercent) {
  torch::manual_seed(0);
  std::vector<TransformerBlock> blocks;
  for (int i = 0; i < 12; ++i) blocks.emplace_back(64, 4, 0.1);
  const Tensor x = torch::randn({8, 64, 64});
  const auto step = [&](bool checkpointed) {
    Tensor y = x;
    for (TransformerBlock& block : blocks)
      y = checkpointed ? checkpoint(block, y) : block->forward(y);
    y.pow(2).mean().backward();
  };
  step(false);  // gradients are there from now on, and are not what is measured
  const std::int64_t plain = peak_of([&] { step(false); }),
                     checkpointed = peak_of([&] { step(true); });
  std::printf(
      "12 blocks: %.1f MB of activations, %.1f MB with every block checkpointed: %.0f%% less\n",
      plain / 1e6, checkpointed / 1e6,
      100.0 - 100.0 * static_cast<double>(checkpointed) / static_cast<double>(plain));
  EXPECT_LE(static_cast<double>(checkpointed), 0.30 * static_cast<double>(plain));
}

TEST(CheckpointTest, ThreadsCheckpointAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      Linear linear(16, 16);
      const Tensor x = torch::randn({8, 16}).requires_grad_();
      const auto fn = [&](const Tensor& in) {
        return torch::tanh(linear(torch::tanh(linear(in))));
      };
      for (int i = 0; i < 50; ++i) {
        const Tensor plain = grad({fn(x).sum()}, {x})[0];
        if (!torch::equal(grad({checkpoint(fn, x).sum()}, {x})[0], plain)) ++num_wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
}

}  // namespace
}  // namespace headroom

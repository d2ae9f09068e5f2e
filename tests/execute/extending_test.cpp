// The worked examples of docs/extending.md: a model family, an optimizer and a data format, each
// with its row, trained together.
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/plan/schedule.h>
#include "data/data_format.h"
#include "model/family.h"
#include "model/image_parts.h"
#include "optim/dense_floats.h"
#include "optim/optimizer_table.h"
#include "optim/options_as.h"
#include "optim/parameter_groups.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace headroom {
namespace {

namespace nn = torch::nn;

// A model: src/model/perceptron.cpp.
struct PerceptronConfig : ImageConfig {
  std::int64_t width = 16;
};

ConfigSetters setters_of(PerceptronConfig& config) {
  ConfigSetters setters = image_setters(config);
  setters.insert({{"width", set_size(config.width)}});
  return setters;
}

ZooModel make_perceptron(const std::string& name, const std::string& text) {
  PerceptronConfig config;
  read_config(name, text, setters_of(config));
  const std::int64_t num_pixels = config.channels * config.rows * config.columns;
  nn::Sequential network;  // each child becomes a stage of the chain
  network->push_back("pixels", nn::Flatten());
  network->push_back("hidden", nn::Linear(num_pixels, config.width));
  network->push_back("tanh", nn::Tanh());
  network->push_back("head", nn::Linear(config.width, config.classes));
  return image_model(network, config, name, text);
}

ModelFamily perceptron_family() {
  PerceptronConfig config;
  return {"one hidden layer",
          {"perceptron"},
          keys_of(setters_of(config)),
          make_perceptron,
          {own_model_type("perceptron")},  // how a saved one is told by its config.json
          [](ConfigFile& file) { return make_perceptron("perceptron", own_sizes(file)); }};
}

// An optimizer: src/optim/sign_sgd.cpp.
struct SignSgdOptions : optim_detail::LeanOptions<SignSgdOptions> {
  explicit SignSgdOptions(double lr) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, weight_decay) = 0;

 public:
  template <typename Self, typename Visit>
  static void each_field(Self& self, Visit visit) {
    visit("lr", self.lr_);
    visit("weight_decay", self.weight_decay_);
  }
};

struct SignSgdState : optim_detail::LeanParamStateOf<SignSgdState> {
  template <typename Self, typename Visit>
  static void each_field(Self& /*self*/, Visit /*visit*/) {}  // it remembers nothing
};

class SignSgd final : public LeanOptimizer {
 public:
  SignSgd(std::vector<torch::optim::OptimizerParamGroup> groups, const SignSgdOptions& defaults)
      : LeanOptimizer(std::move(groups), std::make_unique<SignSgdOptions>(defaults)) {
    check_all_options();
  }
  const char* name() const override { return "sign_sgd"; }

 protected:
  using Options = torch::optim::OptimizerOptions;
  void check_options(const Options& base) const override {
    const auto& options = options_as<SignSgdOptions>(base, *this);
    if (!(options.lr() >= 0)) throw ConfigError("the learning rate must be at least 0");
  }
  std::unique_ptr<LeanParamState> make_state(const at::Tensor& /*like*/,
                                             const Options& /*options*/) const override {
    return std::make_unique<SignSgdState>();
  }
  std::unique_ptr<LeanParamState> make_empty_state() const override {
    return std::make_unique<SignSgdState>();
  }
  void update(at::Tensor& parameter, const at::Tensor& gradient, LeanParamState& /*state*/,
              const Options& base) const override {
    const auto& options = static_cast<const SignSgdOptions&>(base);
    const auto rate = static_cast<float>(options.lr());
    const auto shrink = static_cast<float>(1 - options.lr() * options.weight_decay());
    if (!are_dense_floats({&parameter, &gradient})) {
      parameter.mul_(shrink).add_(gradient.sign(), -rate);
      return;
    }
    float* weights = parameter.data_ptr<float>();
    const float* gradients = gradient.data_ptr<float>();
    for_ranges(parameter.numel(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const auto sign = static_cast<float>((gradients[i] > 0) - (gradients[i] < 0));
        weights[i] = shrink * weights[i] - rate * sign;
      }
    });
    parameter.unsafeGetTensorImpl()->bump_version();
  }
};

OptimizerRow sign_sgd_row() {
  return {"sign_sgd", "nothing",
          [](const OptimizerConfig& config, const NamedParameters& named, const KeepFp32State&) {
            return make_grouped<SignSgd>(config, named, SignSgdOptions(config.learning_rate));
          },
          [](const OptimizerConfig&, const std::vector<std::int64_t>&) { return std::int64_t{0}; },
          /*has_independent_elements=*/true};
}

// A data format: src/data/gray_format.cpp.
class GrayImages final : public Dataset {
 public:
  explicit GrayImages(const ModelInput& input) : input_(input) {}
  std::int64_t size() const override { return 64; }
  MicroBatch load(c10::ArrayRef<std::int64_t> indices) const override {
    const auto count = static_cast<std::int64_t>(indices.size());
    return {{torch::full({count, input_.channels, input_.rows, input_.columns}, 0.5)},
            {torch::zeros({count}, torch::kLong)},
            count,
            count};
  }

 private:
  ModelInput input_;
};

DataFormat gray_format() {
  return {"gray",
          "is gray",
          {ModelInput::Kind::kImages},
          /*takes_tokenizer=*/false,
          [](const std::string& dataset) { return dataset == "gray"; },
          [](const DataRequest& request) {
            OpenedData data;
            data.train = std::make_shared<GrayImages>(request.input);
            return data;
          }};
}

// As tests/optim/state_test.cpp asks it of every row.
TEST(Extending, TheOptimizerAllocatesNothing) {
  MemoryMeter& meter = MemoryMeter::instance();
  at::Tensor weights = torch::randn({300, 300}).requires_grad_();
  const at::Tensor before = weights.detach().clone();
  weights.mutable_grad() = torch::randn({300, 300});
  OptimizerConfig config;
  config.learning_rate = 0.5;
  const auto optimizer = sign_sgd_row().make(config, {{"w", weights}}, {});
  optimizer->prepare_state();
  meter.reset_peak();
  const std::int64_t live = meter.live_bytes();
  optimizer->step();
  EXPECT_EQ(meter.peak_bytes(), live);
  EXPECT_TRUE(torch::equal(weights.detach(), before - 0.5 * weights.grad().sign()));
}

TEST(Extending, TheExamplesOfTheDocumentTrainTogether) {
  seed_everything(1);
  const ZooModel model = perceptron_family().make("perceptron", "width=8,rows=4,columns=4");
  ASSERT_TRUE(gray_format().recognises("gray"));
  DataRequest request;
  request.input = model.input;
  const OpenedData data = gray_format().open(request);

  OptimizerConfig config;
  config.learning_rate = 0.1;
  const NamedParameters parameters = model.chain.named_parameters();
  const auto optimizer = sign_sgd_row().make(config, parameters, nullptr);
  EXPECT_EQ(optimizer->state_bytes(), sign_sgd_row().state_bytes(config, {8, 16}));

  Executor executor(model.chain);
  std::vector<double> losses;
  for (int update = 0; update < 3; ++update) {
    losses.push_back(
        executor.accumulate(data.train->load({0, 1}), keep_everything(model.chain.size()), 0.5)
            .loss_sum);
    optimizer->step();
    optimizer->zero_grad();
  }
  EXPECT_LT(losses[1], losses[0]);
  EXPECT_LT(losses[2], losses[1]);
}

}  // namespace
}  // namespace headroom

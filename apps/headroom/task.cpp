#include "commands.h"

#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/memory/meter.h>

#include <fmt/format.h>

#include <filesystem>

namespace headroom {
namespace {

constexpr const char* kFashionMnistFolder = "/usr/share/datasets/fashion-mnist";
constexpr std::int64_t kSyntheticSamples = 4096;

std::unique_ptr<Dataset> synthetic(const ModelInput& input, std::uint64_t seed) {
  if (input.kind == ModelInput::Kind::kTokens) return make_synthetic_tokens(kSyntheticSamples, input.length, input.vocabulary, seed);
  return make_synthetic_images(kSyntheticSamples, input.channels, input.rows, input.columns, input.num_classes, seed);
}

void open_images(const std::string& folder, const ModelInput& input, const std::string& model, Task& task) {
  if (input.kind != ModelInput::Kind::kImages) {
    throw ConfigError(fmt::format("--model {} reads tokens, but '{}' holds images; give a text file, a .bin of tokens or synthetic", model, folder));
  }
  task.train_data = open_idx_images(folder, true, input.num_classes);
  task.eval_data = open_idx_images(folder, false, input.num_classes);
  const auto image = task.train_data->load({0}).inputs.at(0);
  if (image.size(1) != input.channels || image.size(2) != input.rows || image.size(3) != input.columns) {
    throw DataError(fmt::format("--model {} reads images of {}x{}x{}, but '{}' holds {}x{}x{}; set channels, rows and columns in --model_config",
                                  model, input.channels, input.rows, input.columns, folder, image.size(1), image.size(2), image.size(3)));
  }
}

void open_data(const TrainingArguments& arguments, Task& task) {
  const ModelInput& input = task.model.input;
  if (arguments.dataset == "synthetic") {
    task.train_data = synthetic(input, static_cast<std::uint64_t>(arguments.seed));
    return;
  }
  const std::string path = arguments.dataset == "fashion-mnist" ? kFashionMnistFolder : arguments.dataset;
  if (std::filesystem::is_directory(path) || arguments.dataset == "fashion-mnist") return open_images(path, input, arguments.model, task);
  throw DataError(fmt::format("--dataset '{}': no such file or folder (known names: fashion-mnist, synthetic)", arguments.dataset));
}

}  // namespace

Task make_task(const TrainingArguments& arguments) {
  configure_threads(static_cast<int>(arguments.num_threads));
  if (arguments.device != "cpu" && !runtime_info().has_cuda) {
    throw ConfigError(fmt::format("--device {}: this LibTorch has no CUDA; use --device cpu", arguments.device));
  }
  MemoryMeter& meter = MemoryMeter::instance();
  meter.set_cap(arguments.memory_budget_bytes);
  seed_everything(static_cast<std::uint64_t>(arguments.seed));
  Task task;
  try {
    const OwnerScope owner(Owner::kWeights);
    task.model = make_model(arguments.model, arguments.model_config);
  } catch (const OutOfBudget& error) {
    throw BudgetError(fmt::format("--memory_budget does not even hold the weights of {}: {}", arguments.model, error.what_without_backtrace()));
  }
  open_data(arguments, task);
  return task;
}

}  // namespace headroom

#include "report/trainer_state.h"

#include <nlohmann/json.hpp>

#include <fstream>

namespace headroom {

std::string trainer_state(const TrainingArguments& arguments, const TrainResults& results,
                          std::int64_t max_steps, const std::string& metrics) {
  using Ordered = nlohmann::ordered_json;
  Ordered history = Ordered::array();
  std::ifstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    Ordered entry = Ordered::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_object()) history.push_back(std::move(entry));
  }
  Ordered best_metric, best_folder;  // null
  if (results.best_metric) best_metric = *results.best_metric;
  if (!results.best_model_checkpoint.empty()) best_folder = results.best_model_checkpoint;
  const Ordered state = {{"best_metric", best_metric},
                         {"best_model_checkpoint", best_folder},
                         {"epoch", results.epoch},
                         {"eval_steps", arguments.eval_steps},
                         {"global_step", results.global_step},
                         {"is_hyper_param_search", false},
                         {"is_local_process_zero", true},
                         {"is_world_process_zero", true},
                         {"log_history", std::move(history)},
                         {"logging_steps", arguments.logging_steps},
                         {"max_steps", max_steps},
                         {"num_train_epochs", arguments.num_train_epochs},
                         {"save_steps", arguments.save_steps},
                         {"total_flos", 0},
                         {"train_batch_size", results.micro_batch_size},
                         {"trial_name", nullptr},
                         {"trial_params", nullptr}};
  return state.dump(2) + "\n";
}

}  // namespace headroom

#pragma once

#include <headroom/config/training_arguments.h>
#include <headroom/data/dataset.h>
#include <headroom/data/tokens.h>
#include <headroom/model/zoo.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace CLI {
class App;
}

namespace headroom {

/// The flag --config of a subcommand: a file whose keys are the subcommand's flags.
class ConfigFlag {
 public:
  /// Adds the flag to `command`, which must outlive this.
  explicit ConfigFlag(CLI::App& command);
  ~ConfigFlag();
  ConfigFlag(const ConfigFlag&) = delete;
  ConfigFlag& operator=(const ConfigFlag&) = delete;

  /// Gives each flag of the subcommand what the file says of it, unless the command line did.
  /// Returns the entries whose keys are in `others`, and leaves those alone. Throws ConfigError: an
  /// unknown key names the nearest.
  std::vector<std::pair<std::string, std::string>> apply(
      const std::set<std::string>& others = {}) const;

 private:
  CLI::App* command_;
  std::unique_ptr<std::string> path_;
};

/// The flags of train, plan and compare: adds them to a subcommand and collects what was given.
class ArgumentFlags {
 public:
  /// `names`: only these flags; empty: all of them.
  explicit ArgumentFlags(CLI::App& command, const std::set<std::string>& names = {});
  ~ArgumentFlags();
  ArgumentFlags(const ArgumentFlags&) = delete;
  ArgumentFlags& operator=(const ArgumentFlags&) = delete;

  /// Defaults, then the configuration file, then the flags; validated. The file also sets the
  /// subcommand's other flags. `defaults` are those of the subcommand.
  TrainingArguments arguments(TrainingArguments defaults = {}) const;
  /// Names that the user set, by flag or file.
  const std::set<std::string>& given() const;

 private:
  struct Values;
  std::unique_ptr<Values> values_;
};

/// A model of the zoo with its data, as the arguments say. Weights are made from arguments.seed,
/// under the budget's cap. Cores are shared with the other ranks of this machine.
struct Task {
  TrainingArguments arguments;  ///< as given, with what was left to the machine settled
  ZooModel model;
  std::shared_ptr<const Dataset> train_data;
  std::shared_ptr<const Dataset> eval_data;    ///< null where there is none
  std::shared_ptr<const Tokenizer> tokenizer;  ///< of text; null for other data
  /// What belongs beside the trained model: names and contents.
  std::vector<std::pair<std::string, std::string>> files;
};
/// A TorchScript model is compared with its stages on the first samples, unless it is trusted.
/// `is_trained`: the model may get another head for the classes of the data. Otherwise they must be
/// the model's.
Task make_task(const TrainingArguments& arguments, std::int64_t num_local_ranks = 1,
               bool is_trained = true);
/// The same for a TorchScript model, whatever budget the arguments give; nothing where they name
/// another kind of model.
std::optional<Task> make_uncapped_script_task(const TrainingArguments& arguments);

/// The first samples of data, by which a TorchScript model is cut.
MicroBatch first_samples(const Dataset& data);

/// One subcommand: its flags, and what to do, as an exit code.
using Command = std::function<int()>;
Command add_train_command(CLI::App& app);
Command add_plan_command(CLI::App& app);
Command add_compare_command(CLI::App& app);
Command add_info_command(CLI::App& app);
Command add_estimate_command(CLI::App& app);
Command add_report_command(CLI::App& app);
Command add_evaluate_command(CLI::App& app);
Command add_generate_command(CLI::App& app);

}  // namespace headroom

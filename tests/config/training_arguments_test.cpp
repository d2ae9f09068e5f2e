#include <headroom/config/training_arguments.h>

#include <headroom/core/error.h>
#include "config/argument_fields.h"

#include "support/message_of.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

namespace headroom {
namespace {

using testing::message_of;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class ConfigFile : public ::testing::Test {
 protected:
  ~ConfigFile() override { std::filesystem::remove(path_); }

  const std::string& write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }

  std::string path_ = (std::filesystem::temp_directory_path() /
                       ("headroom_config_" + std::to_string(::getpid()) + ".json"))
                          .string();
};

TEST(TrainingArguments, DefaultsAreThoseOfHuggingFace) {
  const TrainingArguments arguments;
  EXPECT_EQ(arguments.learning_rate, 5e-5);
  EXPECT_EQ(arguments.num_train_epochs, 3.0);
  EXPECT_EQ(arguments.max_grad_norm, 1.0);
  EXPECT_EQ(arguments.lr_scheduler_type, "linear");
  EXPECT_EQ(arguments.seed, 42);
  EXPECT_EQ(arguments.logging_steps, 500);
  EXPECT_EQ(arguments.max_steps, -1);
  EXPECT_EQ(arguments.ddp_timeout, 1800);
  EXPECT_EQ(arguments.fixed_micro_batch(), 8);
  EXPECT_NO_THROW(validate(arguments, {}));
}

TEST(TrainingArguments, TheSpillFolderMustBeThereAndHaveABudget) {
  TrainingArguments arguments;
  arguments.spill_dir = std::filesystem::temp_directory_path().string();
  EXPECT_NO_THROW(validate(arguments, {}));
  EXPECT_TRUE(contains(message_of<ConfigError>([&] { validate(arguments, {"spill_dir"}); }),
                       "--memory_budget"));
  arguments.memory_budget_bytes = 1 << 20;
  EXPECT_NO_THROW(validate(arguments, {"spill_dir", "memory_budget"}));
  arguments.spill_dir = "/nowhere/to/spill";
  EXPECT_TRUE(
      contains(message_of<ConfigError>([&] { validate(arguments, {}); }), "/nowhere/to/spill"));
  arguments.spill_dir.clear();
  EXPECT_TRUE(
      contains(message_of<ConfigError>([&] { validate(arguments, {"spill_dir"}); }), "folder"));
}

TEST_F(ConfigFile, HasTheSpillFolderAsAKey) {
  TrainingArguments arguments;
  apply_config_file(arguments, write(R"({"spill_dir": "/some/where", "memory_budget": "1MiB"})"),
                    {});
  EXPECT_EQ(arguments.spill_dir, "/some/where");
}

TEST(TrainingArguments, EveryFieldReadsBackWhatItPrints) {
  TrainingArguments arguments;
  for (const ArgumentField& field : argument_fields()) {
    if (field.name == "memory_budget") continue;  // prints "none" where there is no budget
    TrainingArguments copy;
    field.set(copy, field.get(arguments));
    EXPECT_EQ(field.get(copy), field.get(arguments)) << field.name;
    EXPECT_FALSE(field.help.empty()) << field.name;
  }
}

TEST(TrainingArguments, SetByName) {
  TrainingArguments arguments;
  set_argument(arguments, "memory_budget", "1.5MiB");
  set_argument(arguments, "learning_rate", "1e-3");
  set_argument(arguments, "bf16", "True");
  set_argument(arguments, "max_steps", "7");
  EXPECT_EQ(arguments.memory_budget_bytes, 1572864);
  EXPECT_EQ(arguments.learning_rate, 1e-3);
  EXPECT_TRUE(arguments.bf16);
  EXPECT_EQ(arguments.max_steps, 7);
}

TEST(TrainingArguments, RefusesTextThatDoesNotFitAndQuotesIt) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"max_steps", "ten"},
      {"max_steps", "1.5"},
      {"max_steps", "99999999999999999999"},
      {"max_steps", ""},
      {"learning_rate", "1e-3x"},
      {"learning_rate", ""},
      {"learning_rate", "nan"},
      {"learning_rate", "inf"},
      {"shuffle", "perhaps"},
      {"memory_budget", "0"},
      {"memory_budget", "5 parsecs"},
      {"memory_budget", "-1MiB"}};
  for (const auto& [name, text] : cases) {
    TrainingArguments arguments;
    const std::string message =
        message_of<ConfigError>([&] { set_argument(arguments, name, text); });
    EXPECT_TRUE(contains(message, "'" + text + "'")) << name << ": " << message;
  }
}

TEST(TrainingArguments, AnUnknownNameGetsTheNearest) {
  TrainingArguments arguments;
  const std::string message =
      message_of<ConfigError>([&] { set_argument(arguments, "learning_rte", "1"); });
  EXPECT_TRUE(contains(message, "'learning_rte'")) << message;
  EXPECT_TRUE(contains(message, "'learning_rate'")) << message;
}

// What ranks must share, what a snapshot must be resumed with and what costs are kept for follows
// from the table.
TEST(ArgumentFields, SayWhatTheyAreComparedFor) {
  const TrainingArguments arguments;
  const auto names = [](const Settings& settings) {
    std::set<std::string> all;
    for (const auto& setting : settings) all.insert(setting.first);
    return all;
  };
  EXPECT_EQ(names(settings_with(FieldTrait::kPerRank, arguments)),
            (std::set<std::string>{"output_dir", "report_to", "disable_tqdm", "json", "sample",
                                   "device", "spill_dir", "num_threads", "ddp_timeout",
                                   "nproc_per_node", "save_model"}));
  EXPECT_EQ(names(settings_with(FieldTrait::kInSnapshot, arguments)),
            (std::set<std::string>{"model",
                                   "model_config",
                                   "model_name_or_path",
                                   "loss",
                                   "task",
                                   "dataset",
                                   "tokenizer",
                                   "text_column",
                                   "label_column",
                                   "image_column",
                                   "group_by_length",
                                   "packing",
                                   "shuffle",
                                   "global_batch_size",
                                   "optim",
                                   "seed",
                                   "data_seed",
                                   "fp16",
                                   "bf16",
                                   "lora_r",
                                   "lora_alpha",
                                   "lora_dropout",
                                   "lora_target_modules",
                                   "freeze",
                                   "load_best_model_at_end",
                                   "metric_for_best_model"}));
  EXPECT_EQ(names(settings_with(FieldTrait::kAffectsCosts, arguments)),
            (std::set<std::string>{"model", "model_config", "model_name_or_path", "loss", "task",
                                   "dataset", "packing", "spill_dir", "fp16", "bf16", "lora_r",
                                   "lora_dropout", "lora_target_modules", "freeze"}));
  EXPECT_EQ(settings_with(FieldTrait::kPerRank, arguments).size() +
                settings_without(FieldTrait::kPerRank, arguments).size(),
            argument_fields().size());
}

TEST(ArgumentFields, EveryWholeNumberHasARangeThatHoldsItsDefault) {
  int num_integers = 0;
  for (const ArgumentField& field : argument_fields()) {
    TrainingArguments arguments;
    EXPECT_NO_THROW(field.check(arguments)) << field.name;
    bool takes_huge = true;
    try {
      field.set(arguments, "9000000000000000000");
    } catch (const ConfigError&) {
      takes_huge = false;
    }
    const bool is_text = field.range.empty() || field.name == "memory_budget";
    if (!takes_huge || is_text || field.range.find("or more") != std::string::npos) continue;
    ++num_integers;
    const bool is_seed = field.name == "seed" || field.name == "data_seed";
    if (!is_seed) {
      EXPECT_THROW(field.check(arguments), ConfigError) << field.name;
    }
  }
  EXPECT_GT(num_integers, 15);
}

TEST_F(ConfigFile, KeysAreFlagsAndValuesOfAnyPlainType) {
  TrainingArguments arguments;
  const auto keys = apply_config_file(
      arguments,
      write(
          R"({"optim": "sgd", "learning_rate": 0.5, "max_steps": 3, "bf16": true, "memory_budget": "1MiB"})"),
      {});
  EXPECT_EQ(keys.size(), 5U);
  EXPECT_EQ(arguments.optim, "sgd");
  EXPECT_EQ(arguments.learning_rate, 0.5);
  EXPECT_EQ(arguments.max_steps, 3);
  EXPECT_TRUE(arguments.bf16);
  EXPECT_EQ(arguments.memory_budget_bytes, 1 << 20);
}

TEST_F(ConfigFile, TheCommandLineWinsButTheFileIsStillChecked) {
  TrainingArguments arguments;
  arguments.max_steps = 9;
  apply_config_file(arguments, write(R"({"max_steps": 3, "seed": 5})"), {"max_steps"});
  EXPECT_EQ(arguments.max_steps, 9);
  EXPECT_EQ(arguments.seed, 5);
  EXPECT_THROW(apply_config_file(arguments, write(R"({"max_steps": "three"})"), {"max_steps"}),
               ConfigError);
}

TEST_F(ConfigFile, RefusesWhatIsNoFlatObjectOfKnownKeys) {
  TrainingArguments arguments;
  const auto message = [&](const std::string& text) {
    return message_of<ConfigError>([&] { apply_config_file(arguments, write(text), {}); });
  };
  EXPECT_TRUE(contains(message(""), path_));
  EXPECT_TRUE(contains(message("{\"max_steps\": 3"), path_));
  EXPECT_TRUE(contains(message("[1, 2]"), path_));
  EXPECT_TRUE(contains(message(R"({"max_steps": [3]})"), "'max_steps'"));
  EXPECT_TRUE(contains(message(R"({"max_steps": null})"), "'max_steps'"));
  EXPECT_TRUE(contains(message(R"({"max_steps": true})"), "'true'"));
  EXPECT_TRUE(contains(message(R"({"bf16": "perhaps"})"), "'perhaps'"));
  EXPECT_TRUE(
      contains(message(R"({"gradient_acumulation_steps": 4})"), "'gradient_accumulation_steps'"));
  EXPECT_TRUE(contains(
      message_of<ConfigError>([&] { apply_config_file(arguments, path_ + ".absent", {}); }),
      path_ + ".absent"));
}

struct Refused {
  std::function<void(TrainingArguments&)> change;
  std::set<std::string> given;
  std::string names;
};

TEST(Validate, RefusesValuesOutOfRangeAndContradictions) {
  using A = TrainingArguments;
  const std::vector<Refused> cases = {
      {[](A& a) { a.per_device_train_batch_size = -8; }, {}, "per_device_train_batch_size"},
      {[](A& a) { a.per_device_train_batch_size = 0; },
       {"per_device_train_batch_size"},
       "per_device_train_batch_size"},
      {[](A& a) { a.global_batch_size = -1; }, {}, "global_batch_size"},
      {[](A& a) { a.gradient_accumulation_steps = "0"; }, {}, "gradient_accumulation_steps"},
      {[](A& a) { a.gradient_accumulation_steps = "1:4"; }, {}, "gradient_accumulation_steps"},
      {[](A& a) { a.gradient_accumulation_steps = "four"; }, {}, "gradient_accumulation_steps"},
      {[](A& a) { a.logging_steps = 0; }, {}, "logging_steps"},
      {[](A& a) { a.eval_steps = 0; }, {}, "eval_steps"},
      {[](A& a) { a.nproc_per_node = 0; }, {}, "nproc_per_node"},
      {[](A& a) { a.ddp_timeout = 0; }, {}, "ddp_timeout"},
      {[](A& a) { a.learning_rate = -1; }, {}, "learning_rate"},
      {[](A& a) { a.weight_decay = -1; }, {}, "weight_decay"},
      {[](A& a) { a.max_grad_norm = -1; }, {}, "max_grad_norm"},
      {[](A& a) { a.warmup_steps = -1; }, {}, "warmup_steps"},
      {[](A& a) { a.adam_beta1 = 1; }, {}, "adam_beta1"},
      {[](A& a) { a.adam_beta2 = -0.1; }, {}, "adam_beta2"},
      {[](A& a) { a.adam_epsilon = -1; }, {}, "adam_epsilon"},
      {[](A& a) { a.max_steps = 0; }, {}, "max_steps"},
      {[](A& a) { a.max_steps = -2; }, {}, "max_steps"},
      {[](A& a) { a.num_train_epochs = 0; }, {}, "num_train_epochs"},
      {[](A& a) { a.seed = -1; }, {}, "seed"},
      {[](A& a) { a.save_steps = -1; }, {}, "save_steps"},
      {[](A& a) { a.num_threads = -1; }, {}, "num_threads"},
      {[](A& a) { a.num_threads = 1'000'000; }, {}, "'1000000': must be from 0 to 1024"},
      {[](A& a) { a.nproc_per_node = 100'000; }, {}, "'100000': must be from 1 to 256"},
      {[](A& a) { a.ddp_timeout = std::int64_t{1} << 62; }, {}, "4611686018427387904"},
      {[](A& a) { a.num_train_epochs = 1e15; }, {}, "must be from 0 to 1000000"},
      {[](A& a) { a.num_train_epochs = std::nan(""); }, {}, "num_train_epochs"},
      {[](A& a) { a.max_steps = std::int64_t{1} << 40; }, {}, "max_steps '1099511627776'"},
      {[](A& a) { a.data_seed = -2; }, {}, "data_seed '-2'"},
      {[](A& a) { a.memory_budget_bytes = -1; }, {}, "memory_budget '-1'"},
      {[](A& a) { a.global_batch_size = 9223372036854775807; }, {}, "9223372036854775807"},
      {[](A& a) { a.gradient_accumulation_steps = "2305843009213693952"; },
       {},
       "--gradient_accumulation_steps 2305843009213693952"},
      {[](A& a) { a.gradient_accumulation_steps = "0:1,1:50000000"; },
       {},
       "--gradient_accumulation_steps 50000000"},
      {[](A& a) {
         a.per_device_train_batch_size = std::int64_t{1} << 62, a.gradient_accumulation_steps = "4";
       },
       {},
       "4611686018427387904"},
      {[](A& a) { a.lr_scheduler_type = "cosin"; }, {}, "'cosine'"},
      {[](A& a) { a.eval_strategy = "epochs"; }, {}, "'epoch'"},
      {[](A& a) { a.report_to = "wandb"; }, {}, "report_to"},
      {[](A& a) { a.gradient_checkpointing = "segments=0"; }, {}, "segments=0"},
      {[](A& a) { a.gradient_checkpointing = "segments=K"; }, {}, "segments"},
      {[](A& a) { a.gradient_checkpointing = "evry"; }, {}, "'every'"},
      {[](A& a) { a.gradient_checkpointing = "optimal"; }, {}, "memory_budget"},
      {[](A& a) { a.device = "tpu"; }, {}, "device"},
      {[](A& a) { a.device = "cudaX"; }, {}, "device"},
      {[](A& a) { a.device = "cuda"; }, {}, "--device cpu"},
      {[](A& a) { a.device = "cuda:1"; }, {}, "--device cpu"},
      {[](A& a) { a.output_dir = ""; }, {}, "output_dir"},
      {[](A& a) { a.fp16 = a.bf16 = true; }, {}, "--fp16 and --bf16"},
      {[](A& a) { a.half_precision_backend = "autocast"; }, {}, "add --bf16 or --fp16"},
      {[](A& a) { a.bf16 = true, a.half_precision_backend = "apex"; }, {}, "auto, autocast, keep"},
      {[](A& a) { a.fp16 = true, a.half_precision_backend = "autocast"; },
       {},
       "--half_precision_backend keep"},
      {[](A& a) { a.global_batch_size = 64; },
       {"gradient_accumulation_steps"},
       "gradient_accumulation_steps"},
      {[](A& a) { a.global_batch_size = 64, a.per_device_train_batch_size = 65; },
       {},
       "global_batch_size"},
  };
  for (const Refused& refused : cases) {
    TrainingArguments arguments;
    refused.change(arguments);
    const std::string message =
        message_of<ConfigError>([&] { validate(arguments, refused.given); });
    EXPECT_TRUE(contains(message, refused.names))
        << "expected " << refused.names << " in: " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(Validate, AcceptsWhatTheDocumentsShow) {
  TrainingArguments arguments;
  arguments.gradient_accumulation_steps = "0:8,4:2";
  arguments.per_device_train_batch_size = 16;
  EXPECT_NO_THROW(
      validate(arguments, {"gradient_accumulation_steps", "per_device_train_batch_size"}));
  arguments = {};
  arguments.global_batch_size = 64;
  arguments.memory_budget_bytes = 1 << 30;
  arguments.gradient_checkpointing = "optimal";
  EXPECT_NO_THROW(validate(arguments, {"global_batch_size"}));
  EXPECT_EQ(arguments.fixed_micro_batch(), 0) << "the planner chooses";
}

}  // namespace
}  // namespace headroom

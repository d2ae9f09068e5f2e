#pragma once

// The model that a user asked for, by name or by folder, with what of it is trained.

#include <headroom/config/training_arguments.h>
#include <headroom/model/pretrained.h>

#include <string>

namespace headroom {

/// The sizes that give a model of the zoo this head: num_labels or classes beside those in
/// `config`, which stay as they are where they say it themselves. Throws ConfigError for a
/// classifier that the family has not.
std::string config_with_head(const std::string& model, const std::string& config,
                             const ModelHead& head);

/// By its sizes alone, with random weights.
ZooModel make_requested_model(const TrainingArguments& arguments, const ModelHead& head = {});

/// As training starts from it.
ZooModel load_requested_model(const TrainingArguments& arguments, const ModelHead& head = {});

/// Adapters and frozen parameters, as --lora_r and --freeze say; a classifier's head is trained
/// beside adapters. `example` as for add_adapters(). Throws ConfigError when the model cannot have
/// them.
void choose_trained_parameters(Chain& chain, const TrainingArguments& arguments,
                               const ModelHead& head = {}, const MicroBatch& example = {});

}  // namespace headroom

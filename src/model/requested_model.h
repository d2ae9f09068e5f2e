#pragma once

// The model that a user asked for, by name or by folder, with what of it is trained.

#include <headroom/config/training_arguments.h>
#include <headroom/model/pretrained.h>

namespace headroom {

/// By its sizes alone, with random weights.
ZooModel make_requested_model(const TrainingArguments& arguments);

/// As training starts from it.
ZooModel load_requested_model(const TrainingArguments& arguments);

/// Adapters and frozen parameters, as --lora_r and --freeze say. Throws ConfigError when the model
/// cannot have them.
void choose_trained_parameters(Chain& chain, const TrainingArguments& arguments);

}  // namespace headroom

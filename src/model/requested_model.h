#pragma once

// The model that a user asked for, by name or by folder.

#include <headroom/config/training_arguments.h>
#include <headroom/model/pretrained.h>

namespace headroom {

/// By its sizes alone, with random weights.
inline ZooModel make_requested_model(const TrainingArguments& arguments) {
  return arguments.model_name_or_path.empty() ? make_model(arguments.model, arguments.model_config)
                                              : make_model_of(arguments.model_name_or_path);
}

/// As training starts from it.
inline ZooModel load_requested_model(const TrainingArguments& arguments) {
  return arguments.model_name_or_path.empty() ? make_model(arguments.model, arguments.model_config)
                                              : load_pretrained(arguments.model_name_or_path);
}

}  // namespace headroom

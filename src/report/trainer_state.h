#pragma once

#include <headroom/config/training_arguments.h>
#include <headroom/report/results.h>

#include <cstdint>
#include <string>

namespace headroom {

/// The contents of trainer_state.json, under Hugging Face's keys. "log_history" holds the lines of
/// `metrics`, a metrics.jsonl; a file that is not there has none.
std::string trainer_state(const TrainingArguments& arguments, const TrainResults& results,
                          std::int64_t max_steps, const std::string& metrics);

}  // namespace headroom

#pragma once

// What a model learns, as --task names it.

#include <headroom/core/micro_batch.h>

#include <string>
#include <vector>

namespace headroom {

enum class TaskKind {
  kCausalLm,
  kMaskedLm,
  kTextClassification,
  kImageClassification,
  kContrastive,
};

/// As --task takes them, in the order of the documentation.
std::vector<std::string> task_names();
const char* task_name(TaskKind task);
/// `name` is one of task_names().
TaskKind parse_task(const std::string& name);

/// What a model that reads this learns.
TaskKind task_of(const ModelInput& input);

}  // namespace headroom

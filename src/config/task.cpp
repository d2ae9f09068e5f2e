#include "config/task.h"

#include "config/argument_fields.h"

namespace headroom {
namespace {

struct TaskRow {
  TaskKind task;
  const char* name;
};
constexpr TaskRow kTasks[] = {{TaskKind::kCausalLm, "causal-lm"},
                              {TaskKind::kMaskedLm, "masked-lm"},
                              {TaskKind::kTextClassification, "text-classification"},
                              {TaskKind::kImageClassification, "image-classification"},
                              {TaskKind::kContrastive, "contrastive"}};

}  // namespace

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const TaskRow& row : kTasks) names.emplace_back(row.name);
  return names;
}

const char* task_name(TaskKind task) {
  for (const TaskRow& row : kTasks) {
    if (row.task == task) return row.name;
  }
  return "";
}

TaskKind parse_task(const std::string& name) {
  require_one_of("task", name, task_names());
  for (const TaskRow& row : kTasks) {
    if (name == row.name) return row.task;
  }
  return TaskKind::kCausalLm;
}

TaskKind task_of(const ModelInput& input) {
  switch (input.kind) {
    case ModelInput::Kind::kImages:
      return TaskKind::kImageClassification;
    case ModelInput::Kind::kPairs:
      return TaskKind::kContrastive;
    case ModelInput::Kind::kTexts:
      return TaskKind::kTextClassification;
    case ModelInput::Kind::kTokens:
      break;
  }
  return input.num_masked > 0 ? TaskKind::kMaskedLm : TaskKind::kCausalLm;
}

}  // namespace headroom

#include "model/script_program.h"

#include <headroom/core/error.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/torch.h>

#include <utility>

namespace headroom::script {
namespace {

using namespace torch::jit;

std::string shapes_text(const std::vector<at::Tensor>& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += fmt::format("{}{}[{}]", text.empty() ? "" : ", ", c10::toString(tensor.scalar_type()),
                        fmt::join(tensor.sizes().vec(), ", "));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

std::string first_line(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string message =
      of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
  const std::size_t begin = message.find_first_not_of(" \n");
  if (begin == std::string::npos) return message;
  return message.substr(begin, message.find('\n', begin) - begin);
}

Stack Signature::arguments(const MicroBatch& micro) const {
  Stack stack;
  const std::size_t num_inputs = micro.inputs.size();
  const std::size_t num_targets = takes_targets ? micro.targets.size() : 0;
  if (given.size() > num_inputs + num_targets) {
    throw DataError(fmt::format(
        "the model's forward takes {} arguments ('{}' is the last), but a sample has {} inputs{}",
        given.size(), given.back().name, num_inputs,
        takes_targets ? fmt::format(" and {} targets", num_targets)
                      : "; a model that computes its loss itself reads targets with --loss model"));
  }
  for (std::size_t i = 0; i < given.size(); ++i)
    stack.push_back(
        unpack(i < num_inputs ? micro.inputs[i] : micro.targets[i - num_inputs], given[i].type));
  return stack;
}

at::Tensor Program::loss(const MicroBatch& micro) { return loss_of(run_whole(micro), micro); }

at::Tensor Program::loss_of(const Stack& outputs, const MicroBatch& micro) const {
  const std::vector<at::Tensor> tensors = tensors_of(outputs);
  if (tensors.empty())
    throw ConfigError("the model returns no tensor: its forward must return scores or a loss");
  return loss_(tensors, micro);
}

std::vector<at::Tensor> Program::results(const Stack& outputs, const MicroBatch& micro,
                                         bool is_training) const {
  std::vector<at::Tensor> results{loss_of(outputs, micro)};
  if (is_training || signature_.takes_targets) return results;
  if (at::Tensor right = count_correct(tensors_of(outputs), micro); right.defined())
    results.insert(results.end(), {std::move(right), tensors_of(outputs).at(0).argmax(1)});
  return results;
}

Stack run_on_data(const std::string& what, const MicroBatch& micro,
                  const std::function<Stack()>& run) {
  try {
    return run();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // of an operator, or raised by the script itself
    throw DataError(fmt::format("{} cannot run on inputs {} and targets {}: {}", what,
                                shapes_text(micro.inputs), shapes_text(micro.targets),
                                first_line(error)));
  }
}

}  // namespace headroom::script

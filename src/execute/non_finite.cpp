#include "execute/non_finite.h"

#include <headroom/core/error.h>
#include <headroom/optim/optimizer.h>

#include <fmt/format.h>

namespace headroom {

std::string skip_or_throw(NonFinitePolicy policy, std::int64_t update,
                          const std::vector<std::pair<std::string, at::Tensor>>& named_gradients,
                          const std::string& otherwise) {
  const std::string message = fmt::format("update {}: the gradient of {} is not finite", update,
                                          first_non_finite(named_gradients).value_or(otherwise));
  if (policy == NonFinitePolicy::kSkip) return message + "; the update is skipped";
  // Settings decide whether training diverges, so it is no defect of ours.
  throw Error(ExitCode::kConfig,
              message + "; stopped as asked; lower the learning rate, or clip gradients");
}

}  // namespace headroom

#pragma once

// Which of the legal cuts a chain gets.

#include "model/script_cuts.h"

#include <optional>
#include <vector>

namespace headroom::script {

/// Chooses about a dozen of the legal cuts: of all ways, one whose stages are of about equal work
/// and memory and whose cuts add few bytes to what is held, weighed over the whole model. Work and
/// bytes are counted, not timed: the same model and shapes give the same cuts. With `arguments`
/// they come from one forward, of which one piece at a time is in memory; buffers and random state
/// are left as they were. Without, each operation and tensor counts as one.
std::vector<const Cut*> choose_cuts(const CutGraph& graph,
                                    const std::optional<torch::jit::Stack>& arguments);

}  // namespace headroom::script

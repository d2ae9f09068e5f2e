#pragma once

#include <headroom/optim/optimizer.h>

#include <cstdint>
#include <optional>

namespace headroom {

/// How long clipping and one update of these parameters take, in nanoseconds: measured on stand-ins
/// for some of them, which are gone afterwards. Nothing when there is no memory for stand-ins.
std::optional<std::int64_t> time_update(const NamedParameters& parameters,
                                        const OptimizerConfig& config, double max_grad_norm);

}  // namespace headroom

#pragma once

#include <headroom/optim/factory.h>
#include <headroom/optim/optimizer_config.h>

#include <cstdint>

namespace headroom {

/// How long clipping and one update of these parameters take, in nanoseconds: measured on stand-ins
/// for some of them, which are gone afterwards. 0 when there is no memory for stand-ins.
std::int64_t time_update(const NamedParameters& parameters, const OptimizerConfig& config,
                         double max_grad_norm);

}  // namespace headroom

#pragma once

#include <headroom/execute/executor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace headroom {

/// How long it takes to carry out `operations` on `micro`, in nanoseconds: the median of a few runs
/// of the whole list, as many as begin within `enough_ns`, in the order and with the state of the
/// caches that training has. Stages that are measured one by one, again and again, seem faster than
/// that. When `gradients_appear`, every run starts without gradients, as the only micro-batch of a
/// window does. Parameters, buffers and random state are left as they were; gradients are cleared
/// before and after. Nothing when memory runs out.
std::optional<std::int64_t> time_operations(const Chain& chain, const MicroBatch& micro,
                                            const std::vector<Operation>& operations,
                                            const ExecutorOptions& options, bool gradients_appear,
                                            std::int64_t enough_ns);

}  // namespace headroom

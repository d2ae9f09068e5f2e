#pragma once

// What ranks tell each other about a window before its gradients are summed, so that all of them do
// the same next.

#include <headroom/comm/communicator.h>
#include <headroom/train/run_plan.h>

#include "train/shape_bucket.h"

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// How a rank's share of a window ended. The later ones outweigh the earlier.
enum class ShareOutcome {
  kDone,
  kWantsOtherPlan,  ///< the plan in use does not cover the shapes of its samples
  kOutOfMemory,
  kStopped,  ///< the rank was asked to stop
  kFailed,   ///< an error that no other plan mends: bad data, a stage that throws
};

struct ShareReport {
  ShareOutcome outcome = ShareOutcome::kDone;
  double loss_sum = 0.0;              ///< over the items of the share
  std::int64_t cap_bytes = 0;         ///< of the meter; 0: none
  std::string has_gradient;           ///< '0' or '1' for each parameter; empty: all have one
  Shapes shapes;                      ///< the largest of the window so far
  std::vector<std::int64_t> samples;  ///< some with these shapes, where another plan is wanted
  std::string reason;                 ///< why memory ran out, or what failed
};

/// The reports of all ranks as one: the worst outcome, the sum of the losses, the smallest cap, the
/// gradients that any has, the largest shapes, and the first reason with its rank. Collective; the
/// same on every rank, bit for bit.
ShareReport agree(Communicator& comm, const ShareReport& report);

/// What carrying out a plan needs of it, as bytes for other ranks, and back.
std::string pack_plan(const RunPlan& plan);
RunPlan unpack_plan(const std::string& bytes);

}  // namespace headroom

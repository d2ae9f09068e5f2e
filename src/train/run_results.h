#pragma once

#include <headroom/model/chain.h>
#include <headroom/report/results.h>

#include "train/rank_group.h"
#include "train/run_log.h"
#include "train/run_planner.h"
#include "train/run_settings.h"
#include "train/snapshot.h"
#include "train/update_step.h"

namespace headroom {

/// The figures of a run so far, without an evaluation: peaks are the largest over the ranks, counts
/// of work their sums. Collective.
TrainResults results_of(const RunSettings& settings, const Chain& chain, const RankGroup& ranks,
                        const RunPlanner& planner, const UpdateStep& step, const RunLog& log,
                        const TrainingPosition& position, double epochs);

}  // namespace headroom

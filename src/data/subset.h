#pragma once

#include <headroom/data/dataset.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace headroom {

/// Some samples of a data set that does not resample, by their numbers there.
std::unique_ptr<Dataset> make_subset(std::shared_ptr<const Dataset> data,
                                     std::vector<std::int64_t> samples);

/// A tenth of the samples for evaluation, drawn by the seed, and the others for training, both in
/// the order of the data. Fewer than ten samples are all for training: the second is null.
std::pair<std::shared_ptr<const Dataset>, std::shared_ptr<const Dataset>> hold_out_a_tenth(
    std::shared_ptr<const Dataset> data, std::uint64_t seed);

}  // namespace headroom

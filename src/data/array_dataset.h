#pragma once

#include "data/data_format.h"

#include <memory>
#include <vector>

namespace headroom {

/// Samples from arrays whose first dimension is the sample, read where they lie. Floating-point
/// elements become float, bytes of images float in [0, 1], other whole numbers int64. Throws
/// DataError when a file is shorter than its array, when numbers of samples differ, or when what
/// the model says about its input does not fit; loading throws it for classes and tokens that the
/// model does not have.
std::unique_ptr<Dataset> make_array_dataset(std::vector<StoredArray> inputs,
                                            std::vector<StoredArray> targets,
                                            const DataRequest& request);

}  // namespace headroom

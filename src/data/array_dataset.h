#pragma once

#include "data/data_format.h"

#include <memory>
#include <vector>

namespace headroom {

/// Samples from arrays whose first dimension is the sample, read where they lie. Floating-point
/// elements become float, bytes of images float in [0, 1], other whole numbers int64, a mask of
/// texts bool. Arrays are what a MicroBatch of the model holds, in its order; the mask may be left
/// out, and so may the places by which texts of a classifier are judged: the first token, or the
/// last one that the mask shows. Throws DataError when a file is shorter than its array, when
/// numbers of samples differ, or when types or shapes are not those that the model reads; loading
/// throws it for classes, tokens and places that the model does not have.
std::unique_ptr<Dataset> make_array_dataset(std::vector<StoredArray> inputs,
                                            std::vector<StoredArray> targets,
                                            const DataRequest& request);

}  // namespace headroom

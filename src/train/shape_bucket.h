#pragma once

// Samples of different lengths: which shapes share a plan.

#include <headroom/core/micro_batch.h>

#include <cstdint>
#include <string>
#include <vector>

namespace headroom {

/// The sizes of every input and target of a micro-batch, without the dimension of the samples.
using Shapes = std::vector<std::vector<std::int64_t>>;

Shapes shapes_of(const MicroBatch& micro);

/// The largest shapes of a bucket: every size rounded up to a power of two or to a quarter of the
/// way to the next one (16, 20, 24, 28, 32, 40, ...), so that the shapes of a bucket differ by at
/// most a quarter, and there are four buckets for each doubling.
Shapes bucket_bounds(Shapes shapes);

/// Names the bucket of some shapes: "24_24". A file may have this name.
std::string bucket_key(const Shapes& shapes);

/// True when the shapes have the same form and none is larger.
bool covers(const Shapes& large, const Shapes& small);

/// The larger size in every place; `b` where the forms differ.
Shapes merged(const Shapes& a, const Shapes& b);

/// "128", or "3x224x224" and whatever else differs from it, for people.
std::string to_text(const Shapes& shapes);

/// The micro-batch with other sizes: cut, or made longer by repeating its last values, which are
/// valid wherever they stand. As it is when it has these shapes already, or another form.
MicroBatch with_shapes(MicroBatch micro, const Shapes& shapes);

}  // namespace headroom

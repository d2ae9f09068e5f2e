#pragma once

#include "data/data_format.h"

#include <string>

namespace headroom {

/// What the header of a .npy file says, as numpy.save writes it. Throws DataError, naming the file,
/// on one that is missing, truncated or malformed, in Fortran's order, big-endian, or of another
/// type than floats, integers and bools.
StoredArray read_npy_header(const std::string& path);

}  // namespace headroom

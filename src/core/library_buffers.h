#pragma once

namespace headroom {

/// Lets the libraries make their threads and buffers now, where they would at their first use. A
/// BLAS that finds no addresses for a buffer (ulimit -v) tries for ever.
void make_library_buffers();

}  // namespace headroom

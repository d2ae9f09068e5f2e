#pragma once

namespace headroom {

/// Makes sure that the descriptors 0 to 2 are open, so that no file of ours becomes one of them and
/// receives what is meant for people. Writing to a standard output that was closed then fails. A
/// reader that goes away (head, a closed terminal) is an error of writing, not the end of the
/// program. Call first of all.
void open_standard_streams();

/// Throws ConfigError when something that was printed to standard output is lost. Call when all is
/// printed.
void check_standard_output();

/// Whether printing to standard output has failed.
bool standard_output_failed();

}  // namespace headroom

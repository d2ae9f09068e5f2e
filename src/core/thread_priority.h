#pragma once

namespace headroom {

/// From now on this thread runs where cores are free, and has a tenth of one beside threads that
/// compute. Threads that compute together wait for the slowest: one that shares its core with
/// another as equals, or is moved to where a third runs, holds up all of them. Does nothing where
/// the system has no priorities of threads.
void give_way_to_computation();

}  // namespace headroom

// Stands in for c10d.cpp where LibTorch was built without Gloo: one rank works, several are
// refused.
#include <headroom/comm/communicator.h>

#include <headroom/core/error.h>

namespace headroom {
namespace {

[[noreturn]] void refuse() {
  throw ConfigError(
      "this build has no Gloo to connect ranks with: train in one process, or build with a "
      "LibTorch that has it (libgloo-dev)");
}

}  // namespace

std::unique_ptr<Communicator> join_ranks(const RankEnvironment& environment,
                                         std::chrono::milliseconds /*timeout*/) {
  if (environment.size > 1) refuse();
  return make_single_communicator();
}

std::function<std::unique_ptr<Communicator>(std::int64_t rank)> make_thread_communicators(
    std::int64_t size, std::chrono::milliseconds /*timeout*/) {
  if (size > 1) refuse();
  return [](std::int64_t /*rank*/) { return make_single_communicator(); };
}

struct RendezvousStore::Store {};

RendezvousStore::RendezvousStore() { refuse(); }
RendezvousStore::~RendezvousStore() = default;
RankEnvironment RendezvousStore::environment(std::int64_t /*rank*/, std::int64_t /*size*/) const {
  return {};
}

}  // namespace headroom

#pragma once

#include <headroom/comm/communicator.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Which rank this process is, as the environment variables of torchrun say.
struct RankEnvironment {
  std::int64_t rank = 0;
  std::int64_t size = 1;
  std::int64_t local_size = 1;  ///< ranks on this machine, which share its cores
  std::string address;          ///< of the machine where the ranks meet
  std::int64_t port = 0;
  bool has_store =
      false;  ///< whoever started the ranks serves the meeting place; otherwise rank 0 does
  std::string store_file;    ///< where ranks of one machine meet instead; empty: at the address
  std::string store_prefix;  ///< keeps ranks that were started again apart from those before

  bool is_given = false;  ///< false: no variable is set, and this is the only rank

  /// Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and where they are set LOCAL_RANK and
  /// LOCAL_WORLD_SIZE (without it, all ranks are taken to be here when they meet on the loopback
  /// address). HEADROOM_RENDEZVOUS_FILE takes the place of MASTER_ADDR and MASTER_PORT. Throws
  /// ConfigError, naming the variables, when they are incomplete or contradict each other.
  static RankEnvironment read();

  /// The variables that make a process this rank.
  std::vector<std::pair<std::string, std::string>> variables() const;
};

/// Waits for the other ranks and connects to them; with one rank, gives the single communicator.
/// Throws CommError when they do not come within `timeout`, which is also how long every later call
/// waits for another rank, and ConfigError when this LibTorch cannot do that.
std::unique_ptr<Communicator> join_ranks(const RankEnvironment& environment,
                                         std::chrono::milliseconds timeout);

/// Where the ranks of one machine meet, for as long as the object lives: a file in a folder that is
/// this user's alone. No port is opened for it; ranks then talk over the loopback address.
class RendezvousStore {
 public:
  /// Throws CommError when it cannot be opened, and ConfigError when this LibTorch cannot do that.
  RendezvousStore();
  ~RendezvousStore();
  RendezvousStore(const RendezvousStore&) = delete;
  RendezvousStore& operator=(const RendezvousStore&) = delete;

  /// For rank `rank` of `size`, all of them on this machine.
  RankEnvironment environment(std::int64_t rank, std::int64_t size) const;

 private:
  struct Store;
  std::unique_ptr<Store> store_;
};

}  // namespace headroom

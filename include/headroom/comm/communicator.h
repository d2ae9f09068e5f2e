#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace headroom {

/// Ranks talking to each other. Every method but rank(), size() and leave() is collective: all
/// ranks call the same methods in the same order, with tensors of the same sizes and types. A call
/// that cannot be finished (a rank ended, was killed, or did not answer in time) throws CommError
/// and leaves the group, so that the other ranks fail at once instead of waiting. Tensors are in an
/// undefined state then. Not thread-safe.
class Communicator {
 public:
  Communicator() = default;
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual std::int64_t rank() const = 0;  ///< from 0
  virtual std::int64_t size() const = 0;
  bool is_first() const { return rank() == 0; }

  /// Replaces every tensor by its sum over the ranks, in place; the result is the same on all of
  /// them, bit for bit. Large tensors are summed where they are, small ones travel together in
  /// `scratch`, a tensor of at least exchange_scratch_bytes() bytes (at::kByte), which is allocated
  /// when it is undefined. bf16 is summed in fp32.
  virtual void sum(const std::vector<at::Tensor>& tensors, const at::Tensor& scratch = {}) = 0;

  /// Replaces every tensor by rank 0's, in place. Scratch memory as for sum().
  virtual void broadcast(const std::vector<at::Tensor>& tensors,
                         const at::Tensor& scratch = {}) = 0;

  /// Rank 0's bytes, on every rank.
  virtual std::string broadcast_bytes(const std::string& bytes) = 0;

  /// The bytes of every rank by rank, on every rank. Meant for a few kilobytes. Allocates no tensor
  /// memory.
  virtual std::vector<std::string> gather(const std::string& bytes) = 0;

  /// The largest of the ranks' values.
  std::int64_t max(std::int64_t value);

  /// Returns when every rank has called it.
  void barrier() { gather(""); }

  /// Closes the connections: calls of other ranks that wait for this one fail at once, and so does
  /// every later call here. For whoever ends for a reason that the others do not know.
  virtual void leave() noexcept = 0;
};

/// Bytes of scratch memory that sum() and broadcast() of so many ranks use for these tensors: at
/// most 1 MiB, and none for one rank.
std::int64_t exchange_scratch_bytes(const std::vector<at::Tensor>& tensors, std::int64_t num_ranks);

/// The only rank: sums and broadcasts leave everything as it is.
std::unique_ptr<Communicator> make_single_communicator();

/// Ranks that are threads of this process, for tests. Each thread calls the function once, with its
/// own rank; it returns when all have.
std::function<std::unique_ptr<Communicator>(std::int64_t rank)> make_thread_communicators(
    std::int64_t size, std::chrono::milliseconds timeout);

/// Which rank this process is, as the environment variables of torchrun say.
struct RankEnvironment {
  std::int64_t rank = 0;
  std::int64_t size = 1;
  std::int64_t local_size = 1;  ///< ranks on this machine, which share its cores
  std::string address;          ///< of the machine where the ranks meet
  std::int64_t port = 0;
  bool has_store =
      false;  ///< whoever started the ranks serves the rendezvous; otherwise rank 0 does
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

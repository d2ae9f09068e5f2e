// Ranks connected by c10d's Gloo.
#include <headroom/comm/communicator.h>

#include <headroom/core/error.h>
#include "core/input_file.h"
#include "core/torch_compat.h"

#include "comm/packing.h"
#include "comm/rendezvous.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <utility>

namespace headroom {
namespace {

using Milliseconds = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// What a library says starts with its own source file in brackets and may go on for lines.
std::string short_reason(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  const std::size_t bracket = text.find("] ");
  if (text.rfind('[', 0) == 0 && bracket != std::string::npos) text = text.substr(bracket + 2);
  return text;
}

std::string remedy(Milliseconds timeout) {
  return fmt::format(
      "look at what the other ranks said, and start all of them again (--resume_from_checkpoint "
      "goes on from a snapshot; "
      "--ddp_timeout, now {} s, is how long a rank waits)",
      std::chrono::duration_cast<std::chrono::seconds>(timeout).count());
}

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(const StorePtr& store, std::int64_t rank, std::int64_t size,
                   const std::string& address, Milliseconds timeout)
      : rank_(rank), size_(size), timeout_(timeout) {
    run("connecting to the other ranks", [&] {
      auto options = c10d::ProcessGroupGloo::Options::create(timeout);
      options->devices.push_back(device(address));
      group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(store, static_cast<int>(rank),
                                                           static_cast<int>(size), options);
    });
    barrier();
  }

  std::int64_t rank() const override { return rank_; }
  std::int64_t size() const override { return size_; }

  void sum(const std::vector<at::Tensor>& tensors, const at::Tensor& scratch) override {
    run("summing tensors", [&] {
      exchange_packed(tensors, Wire::kNumbers, scratch,
                      [this](at::Tensor& flat) { sum_flat(flat); });
    });
  }

  void broadcast(const std::vector<at::Tensor>& tensors, const at::Tensor& scratch) override {
    run("taking over tensors of rank 0", [&] {
      exchange_packed(tensors, Wire::kBytes, scratch,
                      [this](at::Tensor& flat) { broadcast_flat(flat); });
    });
  }

  std::string broadcast_bytes(const std::string& bytes) override {
    std::string result = bytes;
    run("taking over a message of rank 0", [&] {
      auto length = static_cast<std::int64_t>(bytes.size());
      at::Tensor length_view = at::from_blob(&length, {1}, at::kLong);
      broadcast_flat(length_view);
      result.resize(static_cast<std::size_t>(length));
      if (length == 0) return;
      at::Tensor view = at::from_blob(result.data(), {length}, at::kByte);
      broadcast_flat(view);
    });
    return result;
  }

  // Every rank fills its own slot of zeros, and the sum is all slots. Only when a message is longer
  // than a slot is there a second round.
  std::vector<std::string> gather(const std::string& bytes) override {
    constexpr std::size_t kUsualBytes = 256;
    std::vector<std::string> result;
    run("telling the other ranks how it stands", [&] {
      std::size_t longest = kUsualBytes;
      result = gather_slots(bytes, kUsualBytes, longest);
      if (longest > kUsualBytes) result = gather_slots(bytes, longest, longest);
    });
    return result;
  }

  void leave() noexcept override { group_.reset(); }

 private:
  static std::shared_ptr<::gloo::transport::Device> device(const std::string& address) {
    if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))
      return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
    const bool is_here = address == "localhost" || address.rfind("127.", 0) == 0;
    return is_here ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1")
                   : c10d::ProcessGroupGloo::createDefaultDevice();
  }

  template <typename Call>
  void run(const char* what, const Call& call) {
    if (!group_ && has_joined_)
      throw CommError(
          fmt::format("rank {} of {}: {} after it left the other ranks", rank_, size_, what));
    std::string reason;
    try {
      call();
      has_joined_ = true;
      return;
    } catch (const c10::OutOfMemoryError&) {
      leave();
      throw;
    } catch (const std::exception& error) {
      reason = short_reason(error);
    }
    leave();
    has_joined_ = true;
    throw CommError(fmt::format("rank {} of {} lost another rank while {} ({}); {}", rank_, size_,
                                what, reason, remedy(timeout_)));
  }

  void sum_flat(at::Tensor& flat) {
    std::vector<at::Tensor> list{flat};
    group_->allreduce(list)->wait();
  }

  void broadcast_flat(at::Tensor& flat) {
    std::vector<at::Tensor> list{flat};
    group_->broadcast(list)->wait();
  }

  // A slot is a length and the bytes, as far as they fit. Sets `longest` to the longest message.
  std::vector<std::string> gather_slots(const std::string& bytes, std::size_t slot_bytes,
                                        std::size_t& longest) {
    const std::size_t stride = sizeof(std::uint64_t) + slot_bytes;
    std::string slots(stride * static_cast<std::size_t>(size_), '\0');
    char* mine = slots.data() + stride * static_cast<std::size_t>(rank_);
    const std::uint64_t length = bytes.size();
    std::memcpy(mine, &length, sizeof(length));
    std::copy_n(bytes.begin(), std::min(bytes.size(), slot_bytes), mine + sizeof(length));
    at::Tensor view =
        at::from_blob(slots.data(), {static_cast<std::int64_t>(slots.size())}, at::kByte);
    sum_flat(view);
    std::vector<std::string> result;
    for (std::size_t slot = 0; slot < static_cast<std::size_t>(size_); ++slot) {
      std::uint64_t count = 0;
      std::memcpy(&count, slots.data() + slot * stride, sizeof(count));
      longest = std::max<std::size_t>(longest, count);
      result.emplace_back(slots.data() + slot * stride + sizeof(count),
                          std::min<std::size_t>(count, slot_bytes));
    }
    return result;
  }

  std::int64_t rank_;
  std::int64_t size_;
  Milliseconds timeout_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  bool has_joined_ = false;
};

// The table of a RendezvousServer as c10d has it: what connecting to each other needs of a store.
// The rest is a HashStore's, whose methods differ between versions.
class ServedStore final : public c10d::HashStore {
 public:
  ServedStore(const std::string& host, std::int64_t port, Milliseconds timeout)
      : client_(host, port) {
    timeout_ = timeout;
    client_.find("", timeout);  // a place that is not there is told from ranks that are not
  }

  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    client_.set(key, {value.begin(), value.end()}, timeout_);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    const std::string text = client_.get(key, timeout_);
    return {text.begin(), text.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const Milliseconds& timeout) override {
    for (const std::string& key : keys) client_.get(key, timeout);
  }
  bool check(const std::vector<std::string>& keys) override {
    return std::all_of(keys.begin(), keys.end(),
                       [&](const std::string& key) { return client_.find(key, timeout_); });
  }
  // Not in every version: many keys at once would be looked for in this process.
  bool hasExtendedApi() const { return false; }

 private:
  RendezvousClient client_;
};

// The store of whoever started the ranks.
StorePtr open_store(const std::string& host, std::int64_t port, Milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = false;
  options.waitWorkers = false;  // connecting to each other waits for them
  options.timeout = timeout;
  LibUv<c10d::TCPStoreOptions>::switch_off(options);
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

StorePtr open_store(const std::string& file, Milliseconds timeout) {
  // Without its folder, c10d would wait for the file to appear until the time is over.
  if (!is_folder(std::filesystem::path(file).parent_path()))
    throw std::runtime_error("there is no such folder");
  // Ranks that meet again may do so while others still leave: the file is removed with its folder.
  constexpr int kKeepsFile = -1;
  auto store = c10::make_intrusive<c10d::FileStore>(file, kKeepsFile);
  store->setTimeout(timeout);
  return store;
}

StorePtr store_of(const RankEnvironment& environment, Milliseconds timeout) {
  if (!environment.store_file.empty()) return open_store(environment.store_file, timeout);
  if (environment.has_store) return open_store(environment.address, environment.port, timeout);
  return c10::make_intrusive<ServedStore>(environment.address, environment.port, timeout);
}

}  // namespace

std::unique_ptr<Communicator> join_ranks(const RankEnvironment& environment, Milliseconds timeout) {
  if (environment.size == 1) return make_single_communicator();
  const bool is_local = !environment.store_file.empty();
  const bool is_server = environment.rank == 0 && !environment.has_store && !is_local;
  const std::string& host = environment.address;
  std::string reason;
  std::optional<RendezvousServer> place;  // closed as soon as the ranks are connected
  try {
    if (is_server) place.emplace(host, environment.port);
    StorePtr store = store_of(environment, timeout);
    store = c10::make_intrusive<c10d::PrefixStore>(environment.store_prefix + "/headroom",
                                                   std::move(store));
    return std::make_unique<GlooCommunicator>(store, environment.rank, environment.size,
                                              is_local ? "127.0.0.1" : host, timeout);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    reason = short_reason(error);
  }
  const std::string where =
      is_local ? shown_path(environment.store_file) : fmt::format("{}:{}", host, environment.port);
  throw CommError(fmt::format("rank {} of {} cannot {} {} ({}); {}", environment.rank,
                              environment.size,
                              is_server ? "open the rendezvous" : "reach the rendezvous", where,
                              reason, is_server ? "choose another MASTER_PORT" : remedy(timeout)));
}

std::function<std::unique_ptr<Communicator>(std::int64_t rank)> make_thread_communicators(
    std::int64_t size, Milliseconds timeout) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  return [store, size, timeout](std::int64_t rank) -> std::unique_ptr<Communicator> {
    if (size == 1) return make_single_communicator();
    return std::make_unique<GlooCommunicator>(store, rank, size, "127.0.0.1", timeout);
  };
}

struct RendezvousStore::Store {
  std::string folder;
};

RendezvousStore::RendezvousStore() : store_(std::make_unique<Store>()) {
  std::error_code error;
  store_->folder = std::filesystem::temp_directory_path(error) / "headroom-ranks-XXXXXX";
  if (error || ::mkdtemp(store_->folder.data()) == nullptr)
    throw CommError(fmt::format("no folder can be made for ranks to meet ({}): set TMPDIR",
                                error ? error.message() : std::strerror(errno)));
}

RendezvousStore::~RendezvousStore() {
  std::error_code ignored;
  std::filesystem::remove_all(store_->folder, ignored);
}

RankEnvironment RendezvousStore::environment(std::int64_t rank, std::int64_t size) const {
  RankEnvironment result;
  result.is_given = true;
  result.rank = rank;
  result.size = result.local_size = size;
  result.store_file = store_->folder + "/store";
  return result;
}

}  // namespace headroom

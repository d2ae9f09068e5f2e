#include <headroom/comm/communicator.h>

#include <headroom/core/error.h>

#include <gtest/gtest.h>

#include "comm/rank_threads.h"
#include "support/ports.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>

namespace headroom {
namespace {

using namespace headroom::testing;
using Variables = std::map<std::string, std::string>;

// The environment has these variables, of those that matter, and no others.
RankEnvironment read_with(const Variables& variables) {
  for (const char* name :
       {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "HEADROOM_RENDEZVOUS_FILE"}) {
    const auto found = variables.find(name);
    if (found == variables.end()) {
      ::unsetenv(name);
    } else {
      ::setenv(name, found->second.c_str(), 1);
    }
  }
  return RankEnvironment::read();
}

TEST(RankEnvironment, WithoutVariablesThereIsOneRank) {
  const RankEnvironment environment = read_with({{"MASTER_ADDR", "somewhere"}});
  EXPECT_FALSE(environment.is_given);
  EXPECT_EQ(environment.size, 1);
  EXPECT_EQ(join_ranks(environment, kTestTimeout)->size(), 1);
}

TEST(RankEnvironment, ReadsWhatTorchrunSets) {
  const RankEnvironment environment = read_with({{"RANK", "5"},
                                                 {"WORLD_SIZE", "8"},
                                                 {"MASTER_ADDR", "node0"},
                                                 {"MASTER_PORT", "29500"},
                                                 {"LOCAL_RANK", "1"},
                                                 {"LOCAL_WORLD_SIZE", "4"},
                                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                                 {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_TRUE(environment.is_given);
  EXPECT_EQ(environment.rank, 5);
  EXPECT_EQ(environment.size, 8);
  EXPECT_EQ(environment.local_size, 4);
  EXPECT_EQ(environment.address, "node0");
  EXPECT_EQ(environment.port, 29500);
  EXPECT_TRUE(environment.has_store);
  EXPECT_NE(environment.store_prefix.find('2'), std::string::npos);
}

TEST(RankEnvironment, RanksThatMeetOnTheLoopbackAddressShareThisMachine) {
  const Variables variables = {
      {"RANK", "0"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1234"}};
  EXPECT_EQ(read_with(variables).local_size, 3);
  Variables elsewhere = variables;
  elsewhere["MASTER_ADDR"] = "node0";
  EXPECT_EQ(read_with(elsewhere).local_size, 1);
  EXPECT_EQ(read_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).size, 1) << "one rank meets nobody";
}

TEST(RankEnvironment, RefusesVariablesThatAreIncompleteOrContradictEachOther) {
  const Variables good = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1234"}};
  ASSERT_NO_THROW(read_with(good));
  const std::vector<std::pair<std::string, std::string>> changes = {{"RANK", ""},
                                                                    {"WORLD_SIZE", ""},
                                                                    {"MASTER_ADDR", ""},
                                                                    {"MASTER_PORT", ""},
                                                                    {"RANK", "2"},
                                                                    {"RANK", "-1"},
                                                                    {"RANK", "one"},
                                                                    {"WORLD_SIZE", "0"},
                                                                    {"MASTER_PORT", "0"},
                                                                    {"MASTER_PORT", "70000"},
                                                                    {"LOCAL_WORLD_SIZE", "3"},
                                                                    {"LOCAL_WORLD_SIZE", "0"}};
  for (const auto& [name, value] : changes) {
    Variables bad = good;
    bad[name] = value;
    try {
      read_with(bad);
      ADD_FAILURE() << name << "=" << value << " was accepted";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
  }
  Variables local = good;
  local["LOCAL_RANK"] = "2";
  local["LOCAL_WORLD_SIZE"] = "2";
  EXPECT_THROW(read_with(local), ConfigError);
}

TEST(RankEnvironment, RanksOfOneMachineMeetWithoutAPort) {
  const RendezvousStore place;
  std::vector<std::thread> threads;
  std::array<std::vector<std::string>, 2> gathered;
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto comm = join_ranks(place.environment(rank, 2), kTestTimeout);
      gathered[static_cast<std::size_t>(rank)] = comm->gather(std::to_string(comm->rank()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(gathered[0], (std::vector<std::string>{"0", "1"}));
  EXPECT_EQ(gathered[1], gathered[0]);
  const RankEnvironment one = place.environment(1, 2);
  Variables variables;
  for (const auto& [name, value] : one.variables()) variables[name] = value;
  const RankEnvironment read = read_with(variables);
  EXPECT_EQ(read.rank, 1);
  EXPECT_EQ(read.store_file, one.store_file);
  EXPECT_EQ(read.local_size, 2);
  struct stat status {};
  const auto folder = std::filesystem::path(one.store_file).parent_path();
  ASSERT_EQ(::stat(folder.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0077, 0U) << "nobody else may look into it";
}

// Sockets of this process that listen or are connected at other addresses than the loopback one.
int num_outside_sockets() {
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    if (target.rfind("socket:[", 0) == 0) own.insert(target.substr(8, target.size() - 9));
  }
  int count = 0;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream file(table);
    std::string line;
    std::getline(file, line);
    while (std::getline(file, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      const bool is_loopback = local.rfind("0100007F:", 0) == 0;
      const bool is_open = state == "0A" || state == "01";
      if (is_open && !is_loopback && own.count(inode) != 0) ++count;
    }
  }
  return count;
}

// To this thread and those that it starts, the machine is named by an address of its network, at
// which ranks would connect that look for it by its name. Where that is not allowed, the name
// stays.
void name_machine_by_its_address() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return;
  for (const ifaddrs* one = all; one != nullptr; one = one->ifa_next) {
    const bool is_loopback = (one->ifa_flags & IFF_LOOPBACK) != 0;
    if (is_loopback || one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    char name[NI_MAXHOST];
    if (::getnameinfo(one->ifa_addr, sizeof(sockaddr_in), name, sizeof(name), nullptr, 0,
                      NI_NUMERICHOST) != 0 ||
        ::unshare(CLONE_NEWUTS) != 0 || ::sethostname(name, std::strlen(name)) != 0)
      continue;
    break;
  }
  ::freeifaddrs(all);
}

TEST(RankEnvironment, RanksOfOneMachineTalkOverTheLoopbackAddressAlone) {
  const RendezvousStore place;
  std::array<std::unique_ptr<Communicator>, 2> comms;
  std::thread starter([&] {
    name_machine_by_its_address();
    std::vector<std::thread> threads;
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        comms[static_cast<std::size_t>(rank)] =
            join_ranks(place.environment(rank, 2), kTestTimeout);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  starter.join();
  EXPECT_EQ(num_outside_sockets(), 0);
}

TEST(RankEnvironment, RanksThatMeetAtAnAddressCloseItWhenTheyAreConnected) {
  RankEnvironment environment;
  environment.size = 3;
  environment.address = "127.0.0.1";
  environment.port = free_port();
  std::vector<std::thread> threads;
  std::array<std::vector<std::string>, 3> gathered;
  std::array<std::unique_ptr<Communicator>, 3> comms;
  for (std::size_t rank = 0; rank < comms.size(); ++rank) {
    threads.emplace_back([&, environment, rank]() mutable {
      environment.rank = static_cast<std::int64_t>(rank);
      comms[rank] = join_ranks(environment, kTestTimeout);
      gathered[rank] = comms[rank]->gather(std::to_string(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& one : gathered) EXPECT_EQ(one, (std::vector<std::string>{"0", "1", "2"}));
  EXPECT_FALSE(is_listened_on(static_cast<int>(environment.port)));
  environment.rank = 1;
  EXPECT_THROW(join_ranks(environment, std::chrono::seconds(1)), CommError) << "nobody listens";
}

TEST(RankEnvironment, ARankThatNobodyMeetsGivesUp) {
  const RendezvousStore place;
  EXPECT_THROW(join_ranks(place.environment(0, 2), std::chrono::seconds(1)), CommError);
  RankEnvironment lost = place.environment(1, 2);
  lost.store_file = "/nowhere/at/all";
  EXPECT_THROW(join_ranks(lost, std::chrono::seconds(1)), CommError);
  RankEnvironment nowhere = place.environment(1, 2);
  nowhere.store_file.clear();
  nowhere.address = "127.0.0.1";
  nowhere.has_store = true;
  nowhere.port = 1;
  try {
    join_ranks(nowhere, std::chrono::seconds(1));
    FAIL() << "met somebody at port 1";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find("127.0.0.1:1"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace headroom

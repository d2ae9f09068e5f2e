#include "comm/rendezvous.h"

#include "support/ports.h"

#include <gtest/gtest.h>

#include <sys/time.h>

#include <cstdint>
#include <future>
#include <list>
#include <stdexcept>
#include <string>

namespace headroom {
namespace {

using namespace std::chrono_literals;
using testing::free_port;

constexpr auto kLong = 20s;  // far above what a test takes, so that a defect ends it
constexpr const char* kHost = "127.0.0.1";

// Somebody who speaks another language.
class Stranger {
 public:
  explicit Stranger(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    if (::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0)
      throw std::runtime_error("nobody listens");
    const timeval patience{20, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~Stranger() { ::close(socket_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  void say(const std::string& bytes) const {
    ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  bool is_dropped() const {
    char byte = 0;
    const ssize_t count = ::recv(socket_, &byte, 1, 0);
    return count == 0 || (count < 0 && errno == ECONNRESET);
  }

 private:
  int socket_;
};

TEST(RendezvousServer, ARankReadsWhatAnotherWrote) {
  const int port = free_port();
  const RendezvousServer place(kHost, port);
  const RendezvousClient client(kHost, port);
  const std::string binary("a\0b\xff", 4), large(1 << 20, 'x');
  EXPECT_FALSE(client.find("name", kLong));
  client.set("name", binary, kLong);
  client.set("large", large, kLong);
  EXPECT_EQ(client.get("name", kLong), binary);
  EXPECT_EQ(client.find("large", kLong), large);
  client.set("name", "", kLong);
  EXPECT_EQ(client.get("name", kLong), "");
  EXPECT_THROW(client.set("name", large + "x", kLong), std::runtime_error);
}

TEST(RendezvousServer, RanksWaitForThePlaceAndForEachOther) {
  const int port = free_port();
  const RendezvousClient client(kHost, port);
  EXPECT_THROW(client.get("name", 100ms), std::runtime_error) << "nobody opens it";
  auto reader = std::async(std::launch::async, [&] { return client.get("name", kLong); });
  const RendezvousServer place(kHost, port);
  EXPECT_THROW(client.get("other", 100ms), std::runtime_error) << "nobody sets it";
  client.set("name", "text", kLong);
  EXPECT_EQ(reader.get(), "text");
}

TEST(RendezvousServer, StrangersAreDropped) {
  const int port = free_port();
  const RendezvousServer place(kHost, port);
  const std::string magic = "headroom-rendezvous-1";
  const auto length = [](std::uint32_t num_bytes) {  // the lowest byte first
    std::string text;
    for (int i = 0; i < 4; ++i) text += static_cast<char>(num_bytes >> (8 * i) & 0xff);
    return text;
  };
  constexpr std::uint32_t kLongName = (1 << 10) + 1, kLongText = (1 << 20) + 1;
  // The last three are whole: whoever took them for a rank's would answer.
  for (const std::string& said :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(9, '\xff'),
        magic + "x" + std::string(8, '\0'), magic + "s" + std::string(8, '\xff'),
        magic + "g" + std::string(8, '\0') + "more than was announced",
        "headroom-rendezvous-0g" + std::string(8, '\0'),
        magic + "s" + length(kLongName) + length(0) + std::string(kLongName, 'x'),
        magic + "s" + length(0) + length(kLongText) + std::string(kLongText, 'x')}) {
    const Stranger stranger(port);
    stranger.say(said);
    EXPECT_TRUE(stranger.is_dropped()) << said.substr(0, 60);
  }
}

TEST(RendezvousServer, OneThatSaysNothingHoldsUpNobody) {
  const int port = free_port();
  std::list<Stranger> silent;
  {
    const RendezvousServer place(kHost, port);
    for (int i = 0; i < 30; ++i) silent.emplace_back(port).say("h");
    const RendezvousClient client(kHost, port);
    client.set("name", "text", kLong);
    EXPECT_EQ(client.get("name", kLong), "text");
    EXPECT_TRUE(silent.front().is_dropped()) << "after a few seconds";
    silent.emplace_back(port).say("headroom-");
  }  // and the place is closed without waiting for the last one
  EXPECT_TRUE(silent.back().is_dropped());
  EXPECT_THROW(Stranger{port}, std::runtime_error) << "nobody listens any more";
}

TEST(RendezvousServer, APlaceThatIsTakenIsAnError) {
  const int port = free_port();
  const RendezvousServer place(kHost, port);
  EXPECT_THROW(RendezvousServer(kHost, port), std::runtime_error);
}

}  // namespace
}  // namespace headroom

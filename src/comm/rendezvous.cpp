#include "comm/rendezvous.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// A question: kMagic, 's' (set) or 'g' (get), two lengths of 4 bytes, a name and a text. An answer:
// 'y' and the text, or 'n' where there is none.
constexpr std::string_view kMagic = "headroom-rendezvous-1";
constexpr std::size_t kHeadBytes = kMagic.size() + 1 + 8;
constexpr std::size_t kMostNameBytes = 1 << 10, kMostTextBytes = 1 << 20;
constexpr std::size_t kMostEntries = 1 << 16;  // 256 ranks, each with an entry for each other
constexpr std::size_t kMostTableBytes = 1 << 28;
constexpr std::size_t kMostConnections = 512;
constexpr Milliseconds kPatience{5000};  // with one that was accepted
constexpr Milliseconds kPause{20};       // before a rank asks again

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int get() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

struct Addresses {
  addrinfo* first = nullptr;
  ~Addresses() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
  Addresses(const char* host, std::int64_t port, int flags) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    const int error = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &first);
    if (error != 0) fail(::gai_strerror(error));
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
};

Socket new_socket(const addrinfo& address) {
  return Socket(::socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
                         address.ai_protocol));
}

Socket listen_at(const char* host, std::int64_t port, int flags, std::string& reason) {
  const Addresses addresses(host, port, flags);
  for (const addrinfo* one = addresses.first; one != nullptr; one = one->ai_next) {
    Socket socket = new_socket(*one);
    const int on = 1;
    if (socket.is_open() &&
        ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        ::bind(socket.get(), one->ai_addr, one->ai_addrlen) == 0 &&
        ::listen(socket.get(), SOMAXCONN) == 0)
      return socket;
    reason = std::strerror(errno);
  }
  return Socket();
}

// A machine often knows its own name as a loopback address, and an address of a router's is none of
// its own: the ranks elsewhere mean all of its addresses then.
Socket open_place(const std::string& host, std::int64_t port) {
  std::string reason;
  const bool is_loopback = host == "localhost" || host == "::1" || host.rfind("127.", 0) == 0;
  bool is_numeric = true;
  try {
    const Addresses numeric(host.c_str(), port, AI_NUMERICHOST);
  } catch (const std::exception&) {
    is_numeric = false;
  }
  if (is_loopback || is_numeric) {
    Socket socket = listen_at(host.c_str(), port, 0, reason);
    if (socket.is_open() || is_loopback || reason != std::strerror(EADDRNOTAVAIL)) {
      if (!socket.is_open()) fail(reason);
      return socket;
    }
  }
  Socket socket = listen_at(nullptr, port, AI_PASSIVE, reason);
  if (!socket.is_open()) fail(reason);
  return socket;
}

std::string length_text(std::size_t length) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
  return bytes;
}

std::size_t read_length(std::string_view bytes) {
  std::size_t length = 0;
  for (int i = 3; i >= 0; --i)
    length = length << 8 | static_cast<unsigned char>(bytes[static_cast<std::size_t>(i)]);
  return length;
}

std::string question(char kind, const std::string& name, const std::string& text) {
  if (name.size() > kMostNameBytes || text.size() > kMostTextBytes)
    fail("a message between ranks is too long");
  return std::string(kMagic) + kind + length_text(name.size()) + length_text(text.size()) + name +
         text;
}

// Waits for a socket to be ready to be read or written. False: the time is over.
bool wait_for(int descriptor, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd one{descriptor, events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<std::int64_t>(left, 60'000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
  }
}

}  // namespace

class RendezvousServer::Service {
 public:
  explicit Service(Socket listener) : listener_(std::move(listener)) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) fail(std::strerror(errno));
    stop_read_ = Socket(ends[0]);
    stop_write_ = Socket(ends[1]);
    thread_ = std::thread([this] { run(); });
  }
  ~Service() {
    stop_write_ = Socket();  // closed: the other end is readable
    thread_.join();
  }

 private:
  struct Connection {
    Socket socket;
    Clock::time_point deadline;
    std::string in, out;
    bool is_answered = false;
  };

  void run() {
    while (true) {
      std::vector<pollfd> all = {{stop_read_.get(), POLLIN, 0}};
      const bool has_room = connections_.size() < kMostConnections;
      all.push_back({has_room ? listener_.get() : -1, POLLIN, 0});
      for (const Connection& one : connections_) {
        const int events = one.is_answered ? POLLOUT : POLLIN;
        all.push_back({one.socket.get(), static_cast<short>(events), 0});
      }
      constexpr int kTickMilliseconds = 200;  // for deadlines
      if (::poll(all.data(), all.size(), kTickMilliseconds) < 0 && errno != EINTR) return;
      if (all[0].revents != 0) return;
      std::size_t at = 2;
      for (auto one = connections_.begin(); one != connections_.end(); ++at) {
        const bool goes_on = (all[at].revents == 0 || serve(*one)) && Clock::now() < one->deadline;
        one = goes_on ? std::next(one) : connections_.erase(one);
      }
      if (all[1].revents != 0) accept();
    }
  }

  void accept() {
    Socket socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.is_open())
      connections_.push_back({std::move(socket), Clock::now() + kPatience, "", "", false});
  }

  // False: the connection is done with.
  bool serve(Connection& one) {
    if (!one.is_answered) {
      char bytes[1 << 14];
      const ssize_t count = ::recv(one.socket.get(), bytes, sizeof(bytes), 0);
      if (count <= 0) return count < 0 && (errno == EAGAIN || errno == EINTR);
      one.in.append(bytes, static_cast<std::size_t>(count));
      return answer(one);
    }
    const ssize_t count =
        ::send(one.socket.get(), one.out.data(), one.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) return errno == EAGAIN || errno == EINTR;
    one.out.erase(0, static_cast<std::size_t>(count));
    return !one.out.empty();
  }

  bool answer(Connection& one) {
    const std::size_t compared = std::min(one.in.size(), kMagic.size());
    if (one.in.compare(0, compared, kMagic, 0, compared) != 0) return false;
    if (one.in.size() < kHeadBytes) return true;
    const std::string_view lengths = std::string_view(one.in).substr(kMagic.size() + 1, 8);
    const std::size_t name_bytes = read_length(lengths),
                      text_bytes = read_length(lengths.substr(4));
    if (name_bytes > kMostNameBytes || text_bytes > kMostTextBytes) return false;
    const std::size_t size = kHeadBytes + name_bytes + text_bytes;
    if (one.in.size() < size) return true;
    if (one.in.size() > size) return false;
    const std::string name = one.in.substr(kHeadBytes, name_bytes);
    const char kind = one.in[kMagic.size()];
    if (kind == 's' && !enter(name, one.in.substr(kHeadBytes + name_bytes))) return false;
    if (kind != 's' && kind != 'g') return false;
    const auto found = table_.find(name);
    one.out = kind == 's' ? "y" : found == table_.end() ? "n" : "y" + found->second;
    one.in.clear();
    one.is_answered = true;
    return true;
  }

  bool enter(const std::string& name, std::string text) {
    std::string& entry = table_[name];
    table_bytes_ += name.size() + text.size() - entry.size();
    entry = std::move(text);
    return table_.size() <= kMostEntries && table_bytes_ <= kMostTableBytes;
  }

  Socket listener_, stop_read_, stop_write_;
  std::list<Connection> connections_;
  std::map<std::string, std::string> table_;
  std::size_t table_bytes_ = 0;
  std::thread thread_;
};

RendezvousServer::RendezvousServer(const std::string& host, std::int64_t port)
    : service_(std::make_unique<Service>(open_place(host, port))) {}
RendezvousServer::~RendezvousServer() = default;

namespace {

// Not open: nobody is there, and `reason` says why.
Socket connect_to(const addrinfo& address, Clock::time_point deadline, std::string& reason) {
  Socket socket = new_socket(address);
  int error = 0;
  socklen_t length = sizeof(error);
  const bool is_begun =
      socket.is_open() &&
      (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0 || errno == EINPROGRESS);
  if (!is_begun) {
    reason = std::strerror(errno);
  } else if (!wait_for(socket.get(), POLLOUT, deadline)) {
    reason = "nobody answers";
  } else if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
    reason = std::strerror(error);
  } else {
    return socket;
  }
  return Socket();
}

void send_all(const Socket& socket, const std::string& text, Clock::time_point deadline) {
  for (std::size_t sent = 0; sent < text.size();) {
    if (!wait_for(socket.get(), POLLOUT, deadline)) fail("it does not take a question");
    const ssize_t count =
        ::send(socket.get(), text.data() + sent, text.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && errno != EAGAIN && errno != EINTR) fail(std::strerror(errno));
    sent += static_cast<std::size_t>(std::max<ssize_t>(count, 0));
  }
}

std::string receive_all(const Socket& socket, Clock::time_point deadline) {
  std::string text;
  while (text.size() <= kMostTextBytes + 1) {
    if (!wait_for(socket.get(), POLLIN, deadline)) fail("it does not answer");
    char bytes[1 << 14];
    const ssize_t count = ::recv(socket.get(), bytes, sizeof(bytes), 0);
    if (count == 0) break;
    if (count < 0 && errno != EAGAIN && errno != EINTR) fail(std::strerror(errno));
    text.append(bytes, static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  }
  return text;
}

std::string ask_once(const std::string& host, std::int64_t port, const std::string& asked,
                     Clock::time_point deadline) {
  const Addresses addresses(host.c_str(), port, 0);
  const auto patience = std::min(deadline, Clock::now() + kPatience);
  std::string reason;
  for (const addrinfo* one = addresses.first; one != nullptr; one = one->ai_next) {
    const Socket socket = connect_to(*one, patience, reason);
    if (!socket.is_open()) continue;
    send_all(socket, asked, patience);
    const std::string answer = receive_all(socket, patience);
    if (answer.empty() || (answer.front() != 'y' && answer.front() != 'n'))
      fail("something else is served there");
    return answer;
  }
  fail(reason);
}

}  // namespace

std::string RendezvousClient::ask(const std::string& question, Deadline deadline) const {
  while (true) {
    try {
      return ask_once(host_, port_, question, deadline);
    } catch (const std::runtime_error&) {
      if (Clock::now() + kPause >= deadline) throw;
    }
    std::this_thread::sleep_for(kPause);  // rank 0 may be on its way
  }
}

void RendezvousClient::set(const std::string& name, const std::string& text,
                           Milliseconds timeout) const {
  ask(question('s', name, text), Clock::now() + timeout);
}

std::optional<std::string> RendezvousClient::find(const std::string& name,
                                                  Milliseconds timeout) const {
  const std::string answer = ask(question('g', name, ""), Clock::now() + timeout);
  return answer.front() == 'y' ? std::optional<std::string>(answer.substr(1)) : std::nullopt;
}

std::string RendezvousClient::get(const std::string& name, Milliseconds timeout) const {
  const auto deadline = Clock::now() + timeout;
  while (true) {
    const std::string answer = ask(question('g', name, ""), deadline);
    if (answer.front() == 'y') return answer.substr(1);
    if (Clock::now() + kPause >= deadline) fail("the other ranks did not come in time");
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace headroom

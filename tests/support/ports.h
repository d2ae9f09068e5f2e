#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <stdexcept>

namespace headroom::testing {

/// A port of the loopback address that nobody listens on.
inline int free_port() {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (::bind(descriptor, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::runtime_error("no free port");
  ::close(descriptor);
  return ntohs(address.sin_port);
}

/// Whether somebody answers at this port of the loopback address.
inline bool is_listened_on(int port) {
  const int descriptor = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  const bool is_answered =
      ::connect(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  ::close(descriptor);
  return is_answered;
}

}  // namespace headroom::testing

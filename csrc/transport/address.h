// Addresses of the network: IPv4 (10.0.0.7) and IPv6 (fd00::7, fe80::7%eth0), as literals.

#pragma once

#include <sys/socket.h>

#include <string>

namespace shoal {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  // Throws std::runtime_error if the text is no literal of either kind; names are resolved before.
  SocketAddress(const std::string& literal, int port);

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// The port that a socket is bound to.
int local_port(int fd);

// The address of a connection's other end, "?" if it is gone.
std::string peer_address(int fd);

}  // namespace shoal

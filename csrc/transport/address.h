// Addresses of the network: IPv4 (10.0.0.7) and IPv6 (fd00::7, fe80::7%eth0), as literals.

#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

namespace shoal {

// The addresses of a list "10.0.0.7,10.1.0.7", one per interface.
std::vector<std::string> addresses_of(const std::string& list);

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  // Throws std::runtime_error if the text is no literal of either kind; names are resolved before.
  SocketAddress(const std::string& literal, int port);

  int family() const { return storage.ss_family; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Binds a socket to an address of this host, with any port; an empty one leaves the choice to the kernel. Throws
// std::runtime_error if this host does not have it.
void bind_to(int fd, const std::string& address);

// The port that a socket is bound to.
int local_port(int fd);

// The address as the next ones write it, without the interface of a link-local one; as it is, if it is no address.
std::string written_alike(const std::string& address);

// "10.0.0.4:4100", as the ends of a connection both write it.
std::string place_text(const std::string& address, int port);

// The address of a connection's end here, and of its other end; "?" if it is gone.
std::string local_address(int fd);
std::string peer_address(int fd);

}  // namespace shoal

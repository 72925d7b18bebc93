#include "transport/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace shoal {

SocketAddress::SocketAddress(const std::string& literal, int port) {
  const std::uint16_t number = htons(static_cast<std::uint16_t>(port));
  auto& four = reinterpret_cast<sockaddr_in&>(storage);
  if (inet_pton(AF_INET, literal.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = number;
    size = sizeof four;
    return;
  }
  addrinfo hints{};
  hints.ai_family = AF_INET6;
  hints.ai_flags = AI_NUMERICHOST;  // it also reads the interface after the % of a link-local address
  addrinfo* found = nullptr;
  if (getaddrinfo(literal.c_str(), nullptr, &hints, &found) != 0) {
    throw std::runtime_error("'" + literal + "' is not an IPv4 or IPv6 address");
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  size = static_cast<socklen_t>(found->ai_addrlen);
  std::memcpy(&storage, found->ai_addr, size);
  reinterpret_cast<sockaddr_in6&>(storage).sin6_port = number;
}

int local_port(int fd) {
  sockaddr_storage at{};
  socklen_t size = sizeof at;
  getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size);
  // the port is at the same place in both kinds
  return ntohs(reinterpret_cast<const sockaddr_in&>(at).sin_port);
}

std::string peer_address(int fd) {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  char text[NI_MAXHOST] = "?";
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&from), &size) == 0) {
    getnameinfo(reinterpret_cast<const sockaddr*>(&from), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  }
  return text;
}

}  // namespace shoal

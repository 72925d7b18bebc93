#include "transport/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace shoal {

namespace {

std::string text_of(const sockaddr_storage& address, socklen_t size) {
  char text[NI_MAXHOST] = "?";
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

}  // namespace

std::vector<std::string> addresses_of(const std::string& list) {
  std::vector<std::string> all;
  std::size_t begin = 0;
  for (std::size_t end; (end = list.find(',', begin)) != std::string::npos; begin = end + 1) all.push_back(list.substr(begin, end - begin));
  all.push_back(list.substr(begin));
  return all;
}

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

void bind_to(int fd, const std::string& address) {
  if (address.empty()) return;
  const int yes = 1;  // the port is chosen with the connection, so that several to other places may have the same
  setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof yes);
  const SocketAddress at(address, 0);
  if (bind(fd, at.get(), at.size) < 0) throw std::runtime_error("cannot connect from " + address + ": " + std::strerror(errno));
}

int local_port(int fd) {
  sockaddr_storage at{};
  socklen_t size = sizeof at;
  getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size);
  // the port is at the same place in both kinds
  return ntohs(reinterpret_cast<const sockaddr_in&>(at).sin_port);
}

std::string written_alike(const std::string& address) {
  std::string text = address;
  try {
    const SocketAddress read(address.substr(0, address.find('%')), 0);
    text = text_of(read.storage, read.size);
  } catch (const std::runtime_error&) {
  }
  return text;
}

std::string place_text(const std::string& address, int port) {
  static const std::string kMapped = "::ffff:";  // IPv4, at a socket for IPv6
  const std::string text = written_alike(address);
  const bool mapped = text.starts_with(kMapped) && text.find('.') != std::string::npos;
  return (mapped ? text.substr(kMapped.size()) : text) + ":" + std::to_string(port);
}

std::string local_address(int fd) {
  sockaddr_storage at{};
  socklen_t size = sizeof at;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0 ? text_of(at, size) : "?";
}

std::string peer_address(int fd) {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&from), &size) == 0 ? text_of(from, size) : "?";
}

}  // namespace shoal

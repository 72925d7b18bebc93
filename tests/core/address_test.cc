#include "transport/address.h"

#include <netinet/in.h>

#include <stdexcept>
#include <string>

#include "check.h"

namespace address_test {

TEST(address_of_both_kinds) {
  const shoal::SocketAddress four("10.0.0.7", 7070), six("fd00::7", 7070);
  CHECK_EQ(four.family(), AF_INET);
  CHECK_EQ(ntohl(reinterpret_cast<const sockaddr_in*>(four.get())->sin_addr.s_addr), 0x0a000007u);
  CHECK_EQ(six.family(), AF_INET6);
  const auto* at = reinterpret_cast<const sockaddr_in6*>(six.get());
  CHECK_EQ(ntohs(at->sin6_port), 7070);
  CHECK_EQ(int{at->sin6_addr.s6_addr[0]}, 0xfd);
  CHECK_EQ(int{at->sin6_addr.s6_addr[15]}, 7);
}

TEST(address_that_is_no_literal) {
  for (const std::string text : {"localhost", "", "10.0.0", "fd00::7::1", "[fd00::7]", "10.0.0.7:1"}) {
    const std::string why = CHECK_THROWS(std::runtime_error, shoal::SocketAddress(text, 1));
    CHECK_EQ(why, "'" + text + "' is not an IPv4 or IPv6 address");
  }
}

}  // namespace address_test

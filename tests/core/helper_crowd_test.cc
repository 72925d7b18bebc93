// Many processes that come to a helper at the same moment.
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <stdexcept>
#include <string>

#include "check.h"
#include "engine_group.h"
#include "transport/address.h"
#include "transport/handshake.h"

namespace helper_crowd_test {

using namespace shoal_test;
using shoal::Bytes;

// One process of the crowd, up to where it is let in.
struct Guest {
  Guest(const shoal::Credentials& mine, int number, const std::string& place)
      : caller(mine, {"127.0.0.1:9 pid " + std::to_string(number), true, false, "", {}, {}}, place, {}) {}
  ~Guest() { close(fd); }

  void connect(int port) {
    const shoal::SocketAddress to("127.0.0.1", port);
    fd = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    CHECK(::connect(fd, to.get(), to.size) == 0 || errno == EINPROGRESS);
  }
  void say(const Bytes& bytes) { CHECK_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size())); }
  Bytes hear(std::size_t count) {
    Bytes bytes(count);
    for (std::size_t done = 0; done < count;) {
      pollfd ready{fd, POLLIN, 0};
      poll(&ready, 1, static_cast<int>(1000 * kDeadlineS));
      const ssize_t got = recv(fd, bytes.data() + done, count - done, 0);
      if (got <= 0) throw std::runtime_error("the helper has cut it");
      done += static_cast<std::size_t>(got);
    }
    return bytes;
  }

  shoal::Caller caller;
  int fd = -1;
};

// Each has both of its ends in this process.
std::size_t most_guests() {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  return std::min<std::size_t>(2000, (files.rlim_cur - 100) / 2);
}

// None of them has to call again.
TEST(helper_takes_a_crowd_that_comes_at_once) {
  shoal::HelperServer helper("127.0.0.1", 0, kSecret, 0);
  const std::string place = "127.0.0.1:" + std::to_string(helper.port());
  const shoal::Credentials mine{kSecret, shoal::new_key_pair()};
  std::deque<Guest> guests;
  for (std::size_t k = 0; k < most_guests(); ++k) guests.emplace_back(mine, static_cast<int>(k), place).connect(helper.port());
  helper.start();
  for (Guest& each : guests) {
    pollfd connected{each.fd, POLLOUT, 0};
    REQUIRE(poll(&connected, 1, static_cast<int>(1000 * kDeadlineS)) == 1);
    each.say(each.caller.hello());
  }
  for (Guest& each : guests) each.say(each.caller.identity(each.hear(shoal::kChallengeBytes)));
  for (Guest& each : guests) static_cast<void>(each.caller.finish(each.hear(shoal::kWelcomeBytes)));
  await([&] { return helper.counters().at("connections") == guests.size(); }, "the helper has adopted the last one");
  const auto counters = helper.counters();
  CHECK_EQ(counters.at("strangers_dropped"), 0u);
}

}  // namespace helper_crowd_test

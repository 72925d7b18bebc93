#include "transport/handshake.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/address.h"

namespace handshake_test {

using shoal::Bytes;
using shoal::Introduction;

const Bytes kSecret{'k', 'e', 'y'}, kOther{'k', 'e', 'z'};

Introduction some_introduction() { return {"10.0.0.4:4100 pid 812", true}; }

// Every byte changed in turn, in several ways, and every wrong length.
void mutate(const Bytes& message, const std::function<void(const Bytes&)>& see) {
  for (std::size_t at = 0; at < message.size(); ++at) {
    for (int change : {1, 0x80, 0xff}) {
      Bytes other = message;
      other[at] ^= static_cast<std::uint8_t>(change);
      see(other);
    }
  }
}

TEST(handshake_both_sides_understand_each_other) {
  const Bytes caller = shoal::random_bytes(16), listener = shoal::random_bytes(16);
  const Bytes hello = shoal::make_hello(caller);
  CHECK_EQ(hello.size(), shoal::kHelloBytes);
  CHECK(shoal::read_hello(hello) == caller);
  const Bytes challenge = shoal::make_challenge(kSecret, caller, listener);
  CHECK_EQ(challenge.size(), shoal::kChallengeBytes);
  CHECK(shoal::read_challenge(kSecret, caller, challenge) == listener);
  const Bytes identity = shoal::make_identity(kSecret, caller, listener, some_introduction());
  CHECK_EQ(identity.size(), shoal::kIdentityBytes);
  const Introduction read = shoal::read_identity(kSecret, caller, listener, identity);
  CHECK_EQ(read.name, "10.0.0.4:4100 pid 812");
  CHECK(read.control);
}

TEST(handshake_another_secret_or_nonce_is_refused) {
  const Bytes caller = shoal::random_bytes(16), listener = shoal::random_bytes(16), fresh = shoal::random_bytes(16);
  const Bytes challenge = shoal::make_challenge(kSecret, caller, listener);
  const Bytes identity = shoal::make_identity(kSecret, caller, listener, some_introduction());
  CHECK_THROWS(std::runtime_error, shoal::read_challenge(kOther, caller, challenge));
  CHECK_THROWS(std::runtime_error, shoal::read_challenge(kSecret, fresh, challenge));
  CHECK_THROWS(std::runtime_error, shoal::read_identity(kOther, caller, listener, identity));
  CHECK_THROWS(std::runtime_error, shoal::read_identity(kSecret, caller, fresh, identity));  // a replay
  CHECK_THROWS(std::runtime_error, shoal::read_identity(kSecret, fresh, listener, identity));
  // The listener's proof is not one of the caller's: it cannot be reflected.
  const Bytes reflected = shoal::make_challenge(kSecret, listener, caller);
  CHECK_THROWS(std::runtime_error, shoal::read_challenge(kSecret, caller, reflected));
}

TEST(handshake_every_changed_byte_is_refused) {
  const Bytes caller = shoal::random_bytes(16), listener = shoal::random_bytes(16);
  mutate(shoal::make_challenge(kSecret, caller, listener), [&](const Bytes& changed) {
    CHECK_THROWS(std::runtime_error, shoal::read_challenge(kSecret, caller, changed));
  });
  mutate(shoal::make_identity(kSecret, caller, listener, some_introduction()), [&](const Bytes& changed) {
    CHECK_THROWS(std::runtime_error, shoal::read_identity(kSecret, caller, listener, changed));
  });
  int refused = 0;
  mutate(shoal::make_hello(caller), [&](const Bytes& changed) {
    try {
      CHECK(shoal::read_hello(changed) != caller);  // another nonce: its challenge will not fit
    } catch (const std::runtime_error&) {
      ++refused;
    }
  });
  CHECK_EQ(refused, 3 * 8);  // the mark
}

TEST(handshake_messages_of_another_length_are_refused) {
  const Bytes caller = shoal::random_bytes(16), listener = shoal::random_bytes(16);
  const Bytes challenge = shoal::make_challenge(kSecret, caller, listener);
  const Bytes identity = shoal::make_identity(kSecret, caller, listener, some_introduction());
  for (std::size_t size = 0; size < 200; ++size) {
    Bytes bytes(size, 1);
    if (size != shoal::kHelloBytes) CHECK_THROWS(std::runtime_error, shoal::read_hello(bytes));
    Bytes part = challenge;
    part.resize(size);
    if (size != challenge.size()) CHECK_THROWS(std::runtime_error, shoal::read_challenge(kSecret, caller, part));
    part = identity;
    part.resize(size);
    if (size != identity.size()) CHECK_THROWS(std::runtime_error, shoal::read_identity(kSecret, caller, listener, part));
  }
}

TEST(handshake_long_names_are_refused_and_the_longest_goes_through) {
  const Bytes caller = shoal::random_bytes(16), listener = shoal::random_bytes(16);
  Introduction intro = some_introduction();
  intro.name = std::string(128, 'p');
  CHECK_EQ(shoal::read_identity(kSecret, caller, listener, shoal::make_identity(kSecret, caller, listener, intro)).name, intro.name);
  intro.name += "p";
  CHECK_THROWS(std::runtime_error, shoal::make_identity(kSecret, caller, listener, intro));
}

TEST(handshake_call_names_the_address_and_the_reason) {
  const std::string nobody = CHECK_THROWS(std::runtime_error, shoal::call("127.0.0.1", 1, kSecret, some_introduction(), 0.1));
  CHECK(nobody.find("127.0.0.1:1 was not reached") == 0);
  CHECK_EQ(CHECK_THROWS(std::runtime_error, shoal::call("nowhere", 1, kSecret, some_introduction(), 0.1)), "'nowhere' is not an IPv4 or IPv6 address");
}

// A listener on this host that takes each connection, reads `read` bytes of it and hangs up. After `hang_ups` connections it says
// `answer` before.
class Listener {
 public:
  explicit Listener(std::size_t read, int hang_ups = 1 << 30, Bytes answer = {}) : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    const shoal::SocketAddress any("127.0.0.1", 0);
    CHECK(bind(fd_, any.get(), any.size) == 0 && listen(fd_, 16) == 0);
    port = shoal::local_port(fd_);
    thread_ = std::thread([this, read, hang_ups, answer] {
      for (int fd; (fd = accept(fd_, nullptr, nullptr)) >= 0; close(fd)) {
        const bool answers = ++num_calls > hang_ups;
        Bytes bytes(answers ? shoal::kHelloBytes : read);
        if (!bytes.empty()) recv(fd, bytes.data(), bytes.size(), MSG_WAITALL);
        if (answers) send(fd, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
    });
  }
  ~Listener() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    shutdown(fd_, SHUT_RDWR);
    thread_.join();
    close(fd_);
  }

  int port = 0, num_calls = 0;  // read once it has stopped

 private:
  int fd_;
  std::thread thread_;
};

TEST(handshake_call_tries_again_where_the_other_side_hangs_up_and_not_where_it_does_not_know_the_secret) {
  const Bytes strange(shoal::kChallengeBytes, 7);
  for (const std::size_t read : {std::size_t{0}, shoal::kHelloBytes}) {  // a reset, and the end of the stream
    for (const double unreached_s : {60.0, 0.0}) {  // one that is there is called until the timeout
      Listener crowded(read, 2, strange);
      const std::string why =
          CHECK_THROWS(std::runtime_error, shoal::call("127.0.0.1", crowded.port, kSecret, some_introduction(), 60, unreached_s));
      CHECK(why.find("it does not know the job's secret") != std::string::npos);
      crowded.stop();
      CHECK_EQ(crowded.num_calls, 3);
    }
  }
  Listener full(0);
  const std::string late = CHECK_THROWS(std::runtime_error, shoal::call("127.0.0.1", full.port, kSecret, some_introduction(), 0.3));
  CHECK(late.find("was not reached") != std::string::npos);
  // One that is not there is given up before.
  const std::string gone = CHECK_THROWS(std::runtime_error, shoal::call("127.0.0.1", 1, kSecret, some_introduction(), 60, 0));
  CHECK(gone.find("was not reached in 0 s") != std::string::npos);
}

}  // namespace handshake_test

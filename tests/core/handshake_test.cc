#include "transport/handshake.h"

#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/address.h"

namespace handshake_test {

using shoal::Bytes;
using shoal::Introduction;

const Bytes kSecret{'k', 'e', 'y'}, kOther{'k', 'e', 'z'};

Introduction some_introduction() { return {"10.0.0.4:4100 pid 812", true, false, "", {}, shoal::Protection::tag}; }

const char kPlace[] = "10.0.0.7:4000";

shoal::Credentials process(const Bytes& secret) { return {secret, shoal::new_key_pair()}; }

// Two processes that meet: a caller that knows the listener's key, or not.
struct Meeting {
  explicit Meeting(const Bytes& callers = kSecret, const Bytes& listeners = kSecret, const shoal::PublicKey& expected = {})
      : mine(process(callers)), theirs(process(listeners)), caller(mine, some_introduction(), kPlace, expected), listener(theirs, kPlace) {}

  shoal::Credentials mine, theirs;
  shoal::Caller caller;
  shoal::Listener listener;
};

// Every byte changed in turn, in several ways.
void mutate(const Bytes& message, const std::function<void(const Bytes&)>& see) {
  for (std::size_t at = 0; at < message.size(); ++at) {
    for (int change : {1, 0x80, 0xff}) {
      Bytes other = message;
      other[at] ^= static_cast<std::uint8_t>(change);
      see(other);
    }
  }
}

TEST(handshake_both_sides_understand_each_other_and_have_the_same_keys) {
  Meeting meeting;
  auto& [mine, theirs, caller, listener] = meeting;
  const Bytes hello = caller.hello();
  CHECK_EQ(hello.size(), shoal::kHelloBytes);
  const Bytes challenge = listener.challenge(hello);
  CHECK_EQ(challenge.size(), shoal::kChallengeBytes);
  const Bytes identity = caller.identity(challenge);
  CHECK_EQ(identity.size(), shoal::kIdentityBytes);
  const Introduction read = listener.introduction(identity);
  CHECK_EQ(read.name, "10.0.0.4:4100 pid 812");
  CHECK(read.control && !read.knocks && read.key == mine.keys.known && read.protection == shoal::Protection::tag);
  const Bytes welcome = listener.welcome(true);
  CHECK_EQ(welcome.size(), shoal::kWelcomeBytes);
  const shoal::Session here = caller.finish(welcome), there = listener.session();
  CHECK(here.peer == theirs.keys.known && there.peer == mine.keys.known);
  CHECK(here.sends == there.receives && here.receives == there.sends && here.sends != here.receives);
  CHECK(here.protection == shoal::Protection::tag && there.protection == shoal::Protection::tag);
  CHECK(contains(CHECK_THROWS(std::runtime_error, caller.finish(listener.welcome(false))), "refused us"));
}

// The same two processes again: other keys.
TEST(handshake_each_connection_has_keys_of_its_own) {
  const shoal::Credentials mine = process(kSecret), theirs = process(kSecret);
  std::set<shoal::Gcm::Key> keys;
  for (int k = 0; k < 3; ++k) {
    shoal::Caller caller(mine, some_introduction(), kPlace, theirs.keys.known);
    shoal::Listener listener(theirs, kPlace);
    listener.introduction(caller.identity(listener.challenge(caller.hello())));
    keys.insert(listener.session().sends);
    keys.insert(listener.session().receives);
  }
  CHECK_EQ(keys.size(), 6u);
}

// Who has another secret learns it from the first message, before anything is computed with keys.
TEST(handshake_another_secret_or_nonce_is_refused) {
  Meeting other(kOther);
  CHECK_THROWS(shoal::UnknownSecret, other.listener.challenge(other.caller.hello()));
  Meeting first, second;
  const Bytes hello = first.caller.hello();
  const Bytes challenge = first.listener.challenge(hello);
  const Bytes identity = first.caller.identity(challenge);
  second.listener.challenge(hello);  // a replay gets another nonce,
  CHECK_THROWS(shoal::UnknownSecret, second.listener.introduction(identity));  // which its next message does not fit
  second.caller.hello();
  CHECK_THROWS(shoal::UnknownSecret, second.caller.identity(challenge));
  // The listener's message is not one of the caller's: it cannot be reflected.
  Bytes reflected = hello;
  reflected.resize(shoal::kChallengeBytes);
  Meeting third;
  third.caller.hello();
  CHECK_THROWS(shoal::UnknownSecret, third.caller.identity(reflected));
}

TEST(handshake_another_process_or_a_relay_is_refused) {
  Meeting expecting(kSecret, kSecret, process(kSecret).keys.known);
  CHECK(contains(CHECK_THROWS(std::runtime_error, expecting.caller.identity(expecting.listener.challenge(expecting.caller.hello()))),
                 "another process answers there: its public key differs"));
  // Its key is not known, and it listens elsewhere: somebody has passed the call on.
  const shoal::Credentials mine = process(kSecret), theirs = process(kSecret);
  shoal::Caller misled(mine, some_introduction(), "10.0.0.9:4000", {});
  shoal::Listener elsewhere(theirs, kPlace);
  CHECK(contains(CHECK_THROWS(std::runtime_error, misled.identity(elsewhere.challenge(misled.hello()))), "the process at 10.0.0.7:4000 that answers"));
  // With the key, it is the process that is meant, whatever its address is there.
  shoal::Caller knowing(mine, some_introduction(), "10.0.0.9:4000", theirs.keys.known);
  shoal::Listener meant(theirs, kPlace);
  CHECK(meant.introduction(knowing.identity(meant.challenge(knowing.hello()))).key == mine.keys.known);
}

// A member knows the secret, and no other process's private key.
TEST(handshake_a_public_key_without_its_private_one_is_refused) {
  const shoal::Credentials genuine = process(kSecret);
  const shoal::Credentials liar{kSecret, {process(kSecret).keys.own, genuine.keys.known}};
  const shoal::Credentials other = process(kSecret);
  shoal::Caller caller(liar, some_introduction(), kPlace, {});
  shoal::Listener listener(other, kPlace);
  CHECK(contains(CHECK_THROWS(std::runtime_error, listener.introduction(caller.identity(listener.challenge(caller.hello())))), "private key"));
  shoal::Caller called(other, some_introduction(), kPlace, genuine.keys.known);
  shoal::Listener pretends(liar, kPlace);
  called.identity(pretends.challenge(called.hello()));
  Bytes welcome(shoal::kWelcomeBytes, 1);
  CHECK(contains(CHECK_THROWS(std::runtime_error, called.finish(welcome)), "private key"));
}

TEST(handshake_every_changed_byte_is_refused) {
  Meeting meeting;
  const Bytes hello = meeting.caller.hello();
  int num_strangers = 0;
  mutate(hello, [&](const Bytes& changed) {
    shoal::Listener listener(meeting.theirs, kPlace);
    const std::string why = CHECK_THROWS(std::runtime_error, listener.challenge(changed));
    num_strangers += contains(why, "does not speak");
  });
  CHECK_EQ(num_strangers, 3 * 8);  // the mark
  const Bytes challenge = meeting.listener.challenge(hello);
  const shoal::Caller begun = meeting.caller;
  mutate(challenge, [&](const Bytes& changed) {
    shoal::Caller caller = begun;
    CHECK_THROWS(shoal::UnknownSecret, caller.identity(changed));
  });
  const Bytes identity = meeting.caller.identity(challenge);
  const shoal::Listener asked = meeting.listener;
  mutate(identity, [&](const Bytes& changed) {
    shoal::Listener listener = asked;
    CHECK_THROWS(std::runtime_error, listener.introduction(changed));
  });
  meeting.listener.introduction(identity);
  mutate(meeting.listener.welcome(true), [&](const Bytes& changed) { CHECK_THROWS(std::runtime_error, meeting.caller.finish(changed)); });
}

TEST(handshake_messages_of_another_length_are_refused) {
  Meeting meeting;
  const Bytes hello = meeting.caller.hello(), challenge = meeting.listener.challenge(hello);
  const shoal::Caller begun = meeting.caller;
  const shoal::Listener asked = meeting.listener;
  const Bytes identity = meeting.caller.identity(challenge);
  for (std::size_t size = 0; size < 300; ++size) {
    shoal::Caller caller = begun;
    shoal::Listener fresh(meeting.theirs, kPlace), listener = asked;
    Bytes part = hello;
    part.resize(size);
    if (size != hello.size()) CHECK_THROWS(std::runtime_error, fresh.challenge(part));
    part = challenge;
    part.resize(size);
    if (size != challenge.size()) CHECK_THROWS(std::runtime_error, caller.identity(part));
    part = identity;
    part.resize(size);
    if (size != identity.size()) CHECK_THROWS(std::runtime_error, listener.introduction(part));
  }
}

TEST(handshake_long_names_are_refused_and_the_longest_goes_through) {
  for (const std::size_t length : {128, 129}) {
    Introduction intro = some_introduction();
    intro.name = std::string(length, 'p');
    const shoal::Credentials mine = process(kSecret), theirs = process(kSecret);
    shoal::Caller caller(mine, intro, kPlace, {});
    shoal::Listener listener(theirs, kPlace);
    const Bytes challenge = listener.challenge(caller.hello());
    if (length == 128) CHECK_EQ(listener.introduction(caller.identity(challenge)).name, intro.name);
    else CHECK_THROWS(std::runtime_error, caller.identity(challenge));
  }
}

// Calls a port of this host.
void call(int port, double timeout_s, double unreached_s = shoal::kUnreachedS, const std::string& address = "127.0.0.1") {
  shoal::call({address, port}, process(kSecret), some_introduction(), timeout_s, unreached_s);
}

TEST(handshake_call_names_the_address_and_the_reason) {
  const std::string nobody = CHECK_THROWS(std::runtime_error, call(1, 0.1));
  CHECK(nobody.find("127.0.0.1:1 was not reached") == 0);
  CHECK_EQ(CHECK_THROWS(std::runtime_error, call(1, 0.1, 0.1, "nowhere")), "'nowhere' is not an IPv4 or IPv6 address");
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
          CHECK_THROWS(std::runtime_error, call(crowded.port, 60, unreached_s));
      CHECK(why.find("it does not know the job's secret") != std::string::npos);
      crowded.stop();
      CHECK_EQ(crowded.num_calls, 3);
    }
  }
  Listener full(0);
  const std::string late = CHECK_THROWS(std::runtime_error, call(full.port, 0.3));
  CHECK(late.find("was not reached") != std::string::npos);
  // One that is not there is given up before.
  const std::string gone = CHECK_THROWS(std::runtime_error, call(1, 60, 0));
  CHECK(gone.find("was not reached in 0 s") != std::string::npos);
}

}  // namespace handshake_test

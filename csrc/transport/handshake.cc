#include "transport/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <span>
#include <stdexcept>

#include "base/clock.h"
#include "base/log.h"
#include "transport/address.h"

namespace shoal {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMark[9] = "SHOAL\0\0\4";
constexpr std::size_t kNonceBytes = 16, kMacBytes = 32, kHelloMacBytes = 16, kPlaceBytes = 64;
constexpr double kAttemptS = 1.0;
constexpr int kStopMs = 50;                       // a call that is stopped ends so soon
constexpr int kFirstPauseMs = 10, kMostPauseMs = 640;  // between attempts: each is twice as long as the one before

// When a step of a call ends at the latest.
struct Limit {
  Clock::time_point end;
  const std::atomic<bool>* stopped;

  bool is_over() const { return Clock::now() >= end || is_stopped(); }
  bool is_stopped() const { return stopped && *stopped; }
  Limit at_most(double duration_s) const { return {std::min(end, Clock::now() + seconds(duration_s)), stopped}; }
};

Bytes without_end(const Bytes& message, std::size_t count) { return {message.begin(), message.end() - static_cast<std::ptrdiff_t>(count)}; }

void append(Bytes& out, std::span<const std::uint8_t> bytes) { out.insert(out.end(), bytes.begin(), bytes.end()); }

void append_padded(Bytes& out, const std::string& text, std::size_t count) {
  out.insert(out.end(), text.begin(), text.end());
  out.insert(out.end(), count - text.size(), 0);
}

PublicKey key_at(const Bytes& message, std::size_t at) {
  PublicKey key;
  std::copy_n(message.begin() + static_cast<std::ptrdiff_t>(at), key.size(), key.begin());
  return key;
}

void require_size(const Bytes& message, std::size_t size) {
  if (message.size() != size) throw std::runtime_error("it does not speak shoal's protocol");
}

void put(Bytes& out, std::uint32_t value) {
  for (int k = 0; k < 4; ++k) out.push_back(static_cast<std::uint8_t>(value >> (8 * k)));
}

// Text that zeros follow.
std::string text_at(const Bytes& in, std::size_t at, std::size_t most) {
  const auto begin = in.begin() + static_cast<std::ptrdiff_t>(at), end = begin + static_cast<std::ptrdiff_t>(most);
  return {begin, std::find(begin, end, 0)};
}

std::uint32_t get(const Bytes& in, std::size_t at) {
  std::uint32_t value = 0;
  for (std::size_t k = 0; k < 4; ++k) value |= static_cast<std::uint32_t>(in[at + k]) << (8 * k);
  return value;
}

// No answer, or the other side closed the connection early, possibly because it had too many others to handle.
struct Unheard : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void throw_broken() {
  if (errno == ECONNRESET || errno == EPIPE) throw Unheard(std::strerror(errno));
  throw std::runtime_error(std::strerror(errno));
}

// Waits until the socket is readable or writable. Looks once at least: a busy machine may run this after the deadline.
void wait_for(int fd, short events, const Limit& limit) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit.end - Clock::now()).count();
    const auto slice = limit.stopped ? std::min<long>(left, kStopMs) : left;
    pollfd item{fd, events, 0};
    const int ready = poll(&item, 1, slice > 0 ? static_cast<int>(slice) + 1 : 0);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw std::runtime_error(std::strerror(errno));
    if (left <= 0 || limit.is_stopped()) throw std::runtime_error("no answer in time");
  }
}

void send_all(int fd, const Bytes& bytes, const Limit& limit) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t sent = ::send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (sent > 0) done += static_cast<std::size_t>(sent);
    else if (errno == EAGAIN || errno == EINTR) wait_for(fd, POLLOUT, limit);
    else throw_broken();
  }
}

Bytes receive(int fd, std::size_t count, const Limit& limit) {
  Bytes bytes(count);
  std::size_t done = 0;
  while (done < count) {
    const ssize_t got = ::recv(fd, bytes.data() + done, count - done, 0);
    if (got > 0) done += static_cast<std::size_t>(got);
    else if (got == 0) throw Unheard("it hung up");
    else if (errno == EAGAIN || errno == EINTR) wait_for(fd, POLLIN, limit);
    else throw_broken();
  }
  return bytes;
}

int connect_once(const SocketAddress& to, const std::string& from, const Limit& limit) {
  const int fd = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::runtime_error(std::strerror(errno));
  try {
    bind_to(fd, from);
    if (connect(fd, to.get(), to.size) < 0) {
      if (errno != EINPROGRESS) throw std::runtime_error(std::strerror(errno));
      wait_for(fd, POLLOUT, limit);
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
      if (error) throw std::runtime_error(std::strerror(error));
    }
    return fd;
  } catch (...) {
    close(fd);
    throw;
  }
}

Session introduce(int fd, Caller& caller, const Limit& limit) {
  send_all(fd, caller.hello(), limit);
  send_all(fd, caller.identity(receive(fd, kChallengeBytes, limit)), limit);
  return caller.finish(receive(fd, kWelcomeBytes, limit));
}

std::pair<int, Session> try_once(const Destination& to, const Credentials& mine, const Introduction& me, const Limit& limit,
                                 bool& reached) {
  int fd = -1;
  try {
    // The kernel resends a lost SYN only after a second: several short attempts connect sooner.
    fd = connect_once(SocketAddress(to.address, to.port), to.from, limit.at_most(kAttemptS));
  } catch (const std::runtime_error& error) {
    throw Unheard(error.what());
  }
  reached = true;
  try {
    Caller caller(mine, me, place_text(peer_address(fd), to.port), to.key);
    return {fd, introduce(fd, caller, limit)};
  } catch (...) {
    close(fd);
    throw;
  }
}

}  // namespace

Bytes random_bytes(std::size_t count) {
  Bytes bytes(count);
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) {
    throw std::runtime_error("the system returned no random bytes");
  }
  return bytes;
}

// ---- what both sides say --------------------------------------------------------------------------------

Bytes Transcript::signed_by(const char* side, Bytes message, std::size_t mac_bytes) {
  add(message);
  Bytes all(side, side + std::strlen(side));
  append(all, said_);
  const Digest mac = hmac_sha256(mine_.secret, all);
  append(message, std::span(mac).first(mac_bytes));
  return message;
}

void Transcript::take(const char* side, const Bytes& message, std::size_t mac_bytes) {
  if (!equal_in_constant_time(signed_by(side, without_end(message, mac_bytes), mac_bytes), message)) throw UnknownSecret();
}

std::array<Gcm::Key, 4> Transcript::keys_with(const PublicKey& other) const {
  const Digest digest = sha256(said_);
  std::string info = "shoal session";
  info.append(digest.begin(), digest.end());
  std::array<Gcm::Key, 4> keys;
  const Bytes bytes = derived_bytes(common_bytes(mine_.keys.own, other), mine_.secret, info, sizeof keys);
  std::memcpy(keys.data(), bytes.data(), sizeof keys);
  return keys;
}

// ---- the caller -----------------------------------------------------------------------------------------

Caller::Caller(const Credentials& mine, Introduction me, std::string called, const PublicKey& expected)
    : mine_(mine), me_(std::move(me)), called_(std::move(called)), expected_(expected), transcript_(mine) {}

Bytes Caller::hello() {
  Bytes hello(kMark, kMark + 8);
  append(hello, random_bytes(kNonceBytes));
  return transcript_.signed_by("hello", std::move(hello), kHelloMacBytes);
}

PublicKey Caller::listener(const Bytes& challenge) {
  require_size(challenge, kChallengeBytes);
  transcript_.take("listener", challenge, kMacBytes);
  peer_ = key_at(challenge, kNonceBytes);
  if (is_known(expected_) && peer_ != expected_) throw std::runtime_error("another process answers there: its public key differs from the one that the group knows");
  const std::string place = text_at(challenge, kNonceBytes + peer_.size(), kPlaceBytes);
  if (!is_known(expected_) && place != called_) {
    throw std::runtime_error("it is the process at " + printable(place) + " that answers there: a relay, or a translation of addresses, is between; name its own address");
  }
  return peer_;
}

Bytes Caller::identity(const Bytes& challenge) {
  static_cast<void>(listener(challenge));
  if (me_.name.size() > kMaxProcessName) throw std::runtime_error("the process's name is too long");
  Bytes body;
  append_padded(body, me_.name, kMaxProcessName);
  put(body, static_cast<std::uint32_t>(me_.name.size()));
  put(body, (me_.control ? 1u : 0u) | (me_.knocks ? 2u : 0u) | static_cast<std::uint32_t>(me_.protection) << 8);
  append(body, mine_.keys.known);
  Bytes identity = transcript_.signed_by("caller", std::move(body), kMacBytes);
  keys_ = transcript_.keys_with(peer_);
  append(identity, keys_[2]);
  return identity;
}

Session Caller::finish(const Bytes& welcome) const {
  require_size(welcome, kWelcomeBytes);
  if (welcome[0] != 1) throw std::runtime_error("it refused us; its log says why");
  if (!equal_in_constant_time(std::span(welcome).last(keys_[3].size()), keys_[3])) {
    throw std::runtime_error("it does not have the private key of the process that it takes itself for");
  }
  return {peer_, me_.protection, keys_[0], keys_[1]};
}

// ---- the listener ---------------------------------------------------------------------------------------

Bytes Listener::challenge(const Bytes& hello) {
  if (hello.size() != kHelloBytes || !std::equal(kMark, kMark + 8, hello.begin())) {
    throw std::runtime_error("it does not speak shoal's protocol");
  }
  transcript_.take("hello", hello, kHelloMacBytes);
  Bytes challenge = random_bytes(kNonceBytes);
  append(challenge, mine_.keys.known);
  append_padded(challenge, place_, kPlaceBytes);
  return transcript_.signed_by("listener", std::move(challenge), kMacBytes);
}

Introduction Listener::introduction(const Bytes& identity) {
  require_size(identity, kIdentityBytes);
  transcript_.take("caller", without_end(identity, sizeof(Gcm::Key)), kMacBytes);
  const std::uint32_t length = get(identity, kMaxProcessName), wishes = get(identity, kMaxProcessName + 4);
  if (length > kMaxProcessName) throw std::runtime_error("the process's name is too long");
  if (wishes >> 8 >= kNumProtections) throw std::runtime_error("it protects frames in a way that is not known here");
  Introduction intro;
  intro.name.assign(identity.begin(), identity.begin() + length);
  intro.control = wishes & 1;
  intro.knocks = wishes & 2;
  intro.protection = static_cast<Protection>(wishes >> 8);
  intro.key = key_at(identity, kMaxProcessName + 8);
  keys_ = transcript_.keys_with(intro.key);
  if (!equal_in_constant_time(std::span(identity).last(keys_[2].size()), keys_[2])) {
    throw std::runtime_error("it does not have the private key of the process that it takes itself for");
  }
  session_ = {intro.key, intro.protection, keys_[1], keys_[0]};
  return intro;
}

Bytes Listener::welcome(bool admitted) const {
  if (!admitted) return Bytes(kWelcomeBytes);
  Bytes welcome{1};
  append(welcome, keys_[3]);
  return welcome;
}

// ---- calls ----------------------------------------------------------------------------------------------

std::pair<int, Session> call(const Destination& to, const Credentials& mine, const Introduction& me, double timeout_s, double unreached_s,
                             const std::atomic<bool>* stopped) {
  static_cast<void>(SocketAddress(to.address, to.port));  // throws for what is no address
  const std::string place = to.address + ":" + std::to_string(to.port);
  const auto begin = Clock::now();
  const Limit limit{begin + seconds(timeout_s), stopped}, unreached{std::min(limit.end, begin + seconds(unreached_s)), stopped};
  bool reached = false;
  std::string why;
  int pause_ms = kFirstPauseMs;
  do {
    try {
      return try_once(to, mine, me, limit, reached);
    } catch (const Unheard& error) {
      why = error.what();
      poll(nullptr, 0, pause_ms);
      pause_ms = std::min(2 * pause_ms, kMostPauseMs);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(place + ": " + error.what());
    }
  } while (!(reached ? limit : unreached).is_over());
  throw std::runtime_error(place + " was not reached " + (to.from.empty() ? "" : "from " + to.from + " ") + "in " +
                           std::to_string(std::lround(reached ? timeout_s : std::min(timeout_s, unreached_s))) + " s: " + why);
}

PublicKey key_of_listener(const Destination& to, const Bytes& secret, double timeout_s) {
  const Limit limit{Clock::now() + seconds(timeout_s), nullptr};
  const Credentials mine{secret, {}};
  const int fd = connect_once(SocketAddress(to.address, to.port), to.from, limit);
  try {
    Caller caller(mine, {}, place_text(peer_address(fd), to.port), to.key);
    send_all(fd, caller.hello(), limit);
    const PublicKey key = caller.listener(receive(fd, kChallengeBytes, limit));
    close(fd);
    return key;
  } catch (...) {
    close(fd);
    throw;
  }
}

}  // namespace shoal

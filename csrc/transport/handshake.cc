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
#include <stdexcept>

#include "base/clock.h"
#include "base/crypto.h"
#include "transport/address.h"

namespace shoal {

namespace {

using Clock = std::chrono::steady_clock;

constexpr char kMark[9] = "SHOAL\0\0\3";
constexpr std::size_t kNonceBytes = 16, kMacBytes = 32;
constexpr double kAttemptS = 1.0;

Bytes mac(const Bytes& secret, const char* side, const Bytes& caller, const Bytes& listener, const Bytes& more = {}) {
  Bytes message(side, side + std::strlen(side));
  for (const Bytes* part : {&caller, &listener, &more}) message.insert(message.end(), part->begin(), part->end());
  const auto digest = hmac_sha256(secret, message);
  return {digest.begin(), digest.end()};
}

bool same(const Bytes& a, const Bytes& b) { return equal_in_constant_time(a, b); }

void put(Bytes& out, std::uint32_t value) {
  for (int k = 0; k < 4; ++k) out.push_back(static_cast<std::uint8_t>(value >> (8 * k)));
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
void wait_for(int fd, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd item{fd, events, 0};
    const int ready = poll(&item, 1, left > 0 ? static_cast<int>(left) + 1 : 0);
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw std::runtime_error(std::strerror(errno));
    if (left <= 0) throw std::runtime_error("no answer in time");
  }
}

void send_all(int fd, const Bytes& bytes, Clock::time_point deadline) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t sent = ::send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (sent > 0) done += static_cast<std::size_t>(sent);
    else if (errno == EAGAIN || errno == EINTR) wait_for(fd, POLLOUT, deadline);
    else throw_broken();
  }
}

Bytes receive(int fd, std::size_t count, Clock::time_point deadline) {
  Bytes bytes(count);
  std::size_t done = 0;
  while (done < count) {
    const ssize_t got = ::recv(fd, bytes.data() + done, count - done, 0);
    if (got > 0) done += static_cast<std::size_t>(got);
    else if (got == 0) throw Unheard("it hung up");
    else if (errno == EAGAIN || errno == EINTR) wait_for(fd, POLLIN, deadline);
    else throw_broken();
  }
  return bytes;
}

int connect_once(const SocketAddress& to, const std::string& from, Clock::time_point deadline) {
  const int fd = socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) throw std::runtime_error(std::strerror(errno));
  try {
    bind_to(fd, from);
    if (connect(fd, to.get(), to.size) < 0) {
      if (errno != EINPROGRESS) throw std::runtime_error(std::strerror(errno));
      wait_for(fd, POLLOUT, deadline);
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

void introduce(int fd, const Bytes& secret, const Introduction& intro, Clock::time_point deadline) {
  const Bytes caller = random_bytes(kNonceBytes);
  send_all(fd, make_hello(caller), deadline);
  const Bytes listener = read_challenge(secret, caller, receive(fd, kChallengeBytes, deadline));
  send_all(fd, make_identity(secret, caller, listener, intro), deadline);
  if (receive(fd, 1, deadline)[0] != 1) throw std::runtime_error("it refused us; its log says why");
}

int try_once(const SocketAddress& to, const std::string& from, const Bytes& secret, const Introduction& intro, Clock::time_point connect_by,
             Clock::time_point deadline, bool& reached) {
  int fd = -1;
  try {
    fd = connect_once(to, from, connect_by);
  } catch (const std::runtime_error& error) {
    throw Unheard(error.what());
  }
  reached = true;
  try {
    introduce(fd, secret, intro, deadline);
    return fd;
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

Bytes make_hello(const Bytes& nonce) {
  Bytes hello(kHelloBytes);
  std::copy_n(kMark, 8, hello.begin());
  std::copy_n(nonce.begin(), kNonceBytes, hello.begin() + 8);
  return hello;
}

Bytes read_hello(const Bytes& hello) {
  if (hello.size() != kHelloBytes || !std::equal(kMark, kMark + 8, hello.begin())) {
    throw std::runtime_error("it does not speak shoal's protocol");
  }
  return {hello.begin() + 8, hello.end()};
}

Bytes make_challenge(const Bytes& secret, const Bytes& caller, const Bytes& listener) {
  Bytes challenge = listener;
  const Bytes proof = mac(secret, "listener", caller, listener);
  challenge.insert(challenge.end(), proof.begin(), proof.end());
  return challenge;
}

Bytes read_challenge(const Bytes& secret, const Bytes& caller, const Bytes& challenge) {
  if (challenge.size() != kChallengeBytes) throw std::runtime_error("it does not speak shoal's protocol");
  const Bytes listener(challenge.begin(), challenge.begin() + kNonceBytes);
  if (!same(Bytes(challenge.begin() + kNonceBytes, challenge.end()), mac(secret, "listener", caller, listener))) {
    throw std::runtime_error("it does not know the job's secret");
  }
  return listener;
}

Bytes make_identity(const Bytes& secret, const Bytes& caller, const Bytes& listener, const Introduction& intro) {
  if (intro.name.size() > kMaxProcessName) throw std::runtime_error("the process's name is too long");
  Bytes body(kMaxProcessName, 0);
  std::copy(intro.name.begin(), intro.name.end(), body.begin());
  put(body, static_cast<std::uint32_t>(intro.name.size()));
  put(body, intro.control ? 1 : 0);
  const Bytes proof = mac(secret, "caller", caller, listener, body);
  body.insert(body.end(), proof.begin(), proof.end());
  return body;
}

Introduction read_identity(const Bytes& secret, const Bytes& caller, const Bytes& listener, const Bytes& message) {
  if (message.size() != kIdentityBytes) throw std::runtime_error("it does not speak shoal's protocol");
  const Bytes body(message.begin(), message.end() - kMacBytes);
  if (!same(Bytes(message.end() - kMacBytes, message.end()), mac(secret, "caller", caller, listener, body))) {
    throw std::runtime_error("it does not know the job's secret");
  }
  const std::uint32_t length = get(body, kMaxProcessName);
  if (length > kMaxProcessName) throw std::runtime_error("the process's name is too long");
  Introduction intro;
  intro.name.assign(body.begin(), body.begin() + length);
  intro.control = get(body, kMaxProcessName + 4) != 0;
  return intro;
}

int call(const std::string& address, int port, const Bytes& secret, const Introduction& intro, double timeout_s,
         double unreached_s, const std::string& from) {
  const SocketAddress to(address, port);
  const auto begin = Clock::now(), deadline = begin + seconds(timeout_s);
  const auto reached_by = std::min(deadline, begin + seconds(unreached_s));
  bool reached = false;
  std::string why;
  do {
    // The kernel resends a lost SYN only after a second: several short attempts connect sooner.
    const auto attempt = std::min(deadline, Clock::now() + seconds(kAttemptS));
    try {
      return try_once(to, from, secret, intro, attempt, deadline, reached);
    } catch (const Unheard& error) {
      why = error.what();
      poll(nullptr, 0, 20);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(address + ":" + std::to_string(port) + ": " + error.what());
    }
  } while (Clock::now() < (reached ? deadline : reached_by));
  throw std::runtime_error(address + ":" + std::to_string(port) + " was not reached " + (from.empty() ? "" : "from " + from + " ") + "in " +
                           std::to_string(std::lround(reached ? timeout_s : std::min(timeout_s, unreached_s))) + " s: " + why);
}

}  // namespace shoal

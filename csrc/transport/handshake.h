// Mutual authentication before any frame is read, and the keys of the session that follows.
//
//   caller -> listener   magic, caller's nonce, HMAC
//   listener -> caller   listener's nonce, public key and place, HMAC
//   caller -> listener   name, public key, protection of the frames, HMAC, caller's confirmation
//   listener -> caller   1 and the listener's confirmation, or zeros
//
// Each HMAC is under the job's secret and covers all messages so far. Who does not know the secret is cut after the
// first one, and makes nobody compute with public keys. The session's keys come from the bytes that the two private keys
// have in common (X25519), the secret and the messages, by HKDF: they are new with each connection, and of one direction.
// A confirmation shows that its sender has them: that it is the process with this public key.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/crypto.h"
#include "transport/frame.h"
#include "transport/transport.h"

namespace shoal {

using Bytes = std::vector<std::uint8_t>;

inline constexpr std::size_t kMaxProcessName = 128;
inline constexpr std::size_t kHelloBytes = 40;
inline constexpr std::size_t kChallengeBytes = 144;
inline constexpr std::size_t kIdentityBytes = 216;
inline constexpr std::size_t kWelcomeBytes = 17;

Bytes random_bytes(std::size_t count);

// What a process proves to others.
struct Credentials {
  Bytes secret;
  KeyPair keys;
};

// Keys of one side of a connection.
struct Session {
  PublicKey peer{};
  Protection protection{};
  Gcm::Key sends{}, receives{};
};

struct UnknownSecret : std::runtime_error {
  UnknownSecret() : std::runtime_error("it does not know the job's secret") {}
};

// The messages so far, and the keys that both sides get from them.
class Transcript {
 public:
  explicit Transcript(const Credentials& mine) : mine_(mine) {}

  void add(const Bytes& message) { said_.insert(said_.end(), message.begin(), message.end()); }
  // Adds a message of the caller or the listener, and returns it with its HMAC of this length.
  Bytes signed_by(const char* side, Bytes message, std::size_t mac_bytes);
  // Adds a message that was received. Throws std::runtime_error if its sender does not know the secret.
  void take(const char* side, const Bytes& message, std::size_t mac_bytes);

  // With the process that has this public key: of the caller's frames and of the listener's, and their confirmations.
  std::array<Gcm::Key, 4> keys_with(const PublicKey& other) const;

 private:
  const Credentials& mine_;
  Bytes said_;
};

// The two sides. Functions that take a message throw std::runtime_error if the other side does not know the secret, is
// another process, or uses another protocol.
class Caller {
 public:
  // `called`: "10.0.0.4:4100", the place where it connects. `expected`: its public key; if it is not known, that place
  // must be the listener's own.
  Caller(const Credentials& mine, Introduction me, std::string called, const PublicKey& expected);

  Bytes hello();
  // Returns the public key of the listener, which has yet to show that it has the private one.
  PublicKey listener(const Bytes& challenge);
  Bytes identity(const Bytes& challenge);
  Session finish(const Bytes& welcome) const;

 private:
  const Credentials& mine_;
  const Introduction me_;
  const std::string called_;
  const PublicKey expected_;
  Transcript transcript_;
  PublicKey peer_{};
  std::array<Gcm::Key, 4> keys_{};
};

class Listener {
 public:
  // `place`: its own end of the connection.
  Listener(const Credentials& mine, std::string place) : mine_(mine), place_(std::move(place)), transcript_(mine) {}

  Bytes challenge(const Bytes& hello);
  Introduction introduction(const Bytes& identity);
  Bytes welcome(bool admitted) const;
  Session session() const { return session_; }

 private:
  const Credentials& mine_;
  const std::string place_;
  Transcript transcript_;
  std::array<Gcm::Key, 4> keys_{};
  Session session_;
};

inline constexpr double kUnreachedS = 30.0;

// A place to connect to.
struct Destination {
  std::string address;
  int port = 0;
  PublicKey key{};        // of the process there
  std::string from = {};  // address of this host; empty: the kernel's choice
};

// Connects and authenticates; returns the socket in non-blocking mode, and the session. Throws std::runtime_error with the
// address and the reason: after `timeout_s`, or after `unreached_s` if no connection to its port was accepted at all, or
// soon after `stopped` is set. A process that is alive may be slow to answer.
std::pair<int, Session> call(const Destination& to, const Credentials& mine, const Introduction& me, double timeout_s,
                             double unreached_s = kUnreachedS, const std::atomic<bool>* stopped = nullptr);

// Returns the public key that the process at a place names, of which connections to this place then ask a proof. Throws
// std::runtime_error if it does not answer in time, does not know the secret, or listens at another place.
PublicKey key_of_listener(const Destination& to, const Bytes& secret, double timeout_s);

}  // namespace shoal

// Mutual authentication before any frame is read: both ends prove knowledge of the job's secret by an HMAC-SHA256
// over both nonces.
//
//   caller -> listener   magic, caller's nonce
//   listener -> caller   listener's nonce, HMAC("listener", both nonces)
//   caller -> listener   identity, HMAC("caller", both nonces, identity)
//   listener -> caller   1
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.h"

namespace shoal {

using Bytes = std::vector<std::uint8_t>;

inline constexpr std::size_t kMaxProcessName = 128;
inline constexpr std::size_t kHelloBytes = 24;
inline constexpr std::size_t kChallengeBytes = 48;
inline constexpr std::size_t kIdentityBytes = 168;

Bytes random_bytes(std::size_t count);

// The steps, as pure functions of the bytes received so far. The parsing ones throw std::runtime_error if the other
// side does not know the secret or uses another protocol.
Bytes make_hello(const Bytes& nonce);
Bytes read_hello(const Bytes& hello);  // the caller's nonce
Bytes make_challenge(const Bytes& secret, const Bytes& caller, const Bytes& listener);
Bytes read_challenge(const Bytes& secret, const Bytes& caller, const Bytes& challenge);  // the listener's nonce
Bytes make_identity(const Bytes& secret, const Bytes& caller, const Bytes& listener, const Introduction& intro);
Introduction read_identity(const Bytes& secret, const Bytes& caller, const Bytes& listener, const Bytes& message);

inline constexpr double kUnreachedS = 30.0;

// Connects from an address of this host, if one is given, and authenticates; returns the socket in non-blocking mode. Throws std::runtime_error with the address and
// the reason: after `timeout_s`, or after `unreached_s` if no connection to its port was accepted at all. A process that
// is alive may be slow to answer.
int call(const std::string& address, int port, const Bytes& secret, const Introduction& intro, double timeout_s,
         double unreached_s = kUnreachedS, const std::string& from = "");

}  // namespace shoal

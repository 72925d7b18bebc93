// Both ends prove that they know the job's secret before any frame is read: HMAC-SHA256 over both nonces.
//
//   caller -> listener   mark, caller's nonce
//   listener -> caller   listener's nonce, HMAC("listener", both nonces)
//   caller -> listener   who it is, HMAC("caller", both nonces, who it is)
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

inline constexpr std::size_t kMaxGroupName = 128;
inline constexpr std::size_t kHelloBytes = 24;
inline constexpr std::size_t kChallengeBytes = 48;
inline constexpr std::size_t kIdentityBytes = 184;

Bytes random_bytes(std::size_t count);

// The steps, as pure functions of the bytes seen so far. Those that read throw std::runtime_error where the
// other side does not know the secret or does not speak our language.
Bytes make_hello(const Bytes& nonce);
Bytes read_hello(const Bytes& hello);  // the caller's nonce
Bytes make_challenge(const Bytes& secret, const Bytes& caller, const Bytes& listener);
Bytes read_challenge(const Bytes& secret, const Bytes& caller, const Bytes& challenge);  // the listener's nonce
Bytes make_identity(const Bytes& secret, const Bytes& caller, const Bytes& listener, const Introduction& intro);
Introduction read_identity(const Bytes& secret, const Bytes& caller, const Bytes& listener, const Bytes& message);

// Connects and introduces itself; returns the socket, which blocks no longer.
// Throws std::runtime_error that names the address and the reason.
int call(const std::string& address, int port, const Bytes& secret, const Introduction& intro, double timeout_s);

}  // namespace shoal

// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for authentication with the job's secret: a few hundred bytes per
// connection, so it is portable code without a library. Not for bulk data.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace shoal {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::span<const std::uint8_t> message);

Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message);

// Compares in constant time, except that different lengths return false at once.
bool equal_in_constant_time(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b);

}  // namespace shoal

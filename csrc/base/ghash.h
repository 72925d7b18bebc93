// GHASH of AES-GCM (NIST SP 800-38D) for data that stays readable, by instructions that multiply four blocks at once.
//
// libcrypto's own is for processors of all kinds, and its older versions use narrower ones: the tags of a link would cost
// several times as much as its checksums. AES is left to libcrypto, as is GHASH where these instructions are missing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace shoal {

class Ghash {
 public:
  using Block = std::array<std::uint8_t, 16>;

  // Whether this processor has the instructions; without them, no other function is called.
  static bool is_supported();

  // `subkey`: the encryption of a block of zeros.
  explicit Ghash(const Block& subkey);

  // Returns GHASH of the bytes as additional authenticated data, without a ciphertext.
  Block of(const void* data, std::size_t size) const;

 private:
  static constexpr std::size_t kPowers = 40, kAfter = 4;
  // Powers of the subkey, the greatest first: a vector of four consecutive ones begins at each. Zeros follow.
  alignas(64) std::array<Block, kPowers + kAfter> powers_{};
};

}  // namespace shoal

// Cryptography of the wire, by OpenSSL's libcrypto: SHA-256 (FIPS 180-4), HMAC (RFC 2104), HKDF (RFC 5869), X25519
// (RFC 7748) and AES-128-GCM (NIST SP 800-38D; tags without encryption by Ghash). All throw std::runtime_error if the library fails.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/ghash.h"

struct evp_cipher_ctx_st;

namespace shoal {

using Digest = std::array<std::uint8_t, 32>;

Digest sha256(std::span<const std::uint8_t> message);
Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message);

// Compares in constant time, except that different lengths return false at once.
bool equal_in_constant_time(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b);

// Returns `count` bytes of HKDF-SHA256.
std::vector<std::uint8_t> derived_bytes(std::span<const std::uint8_t> secret, std::span<const std::uint8_t> salt,
                                        std::string_view info, std::size_t count);

// A public key of zeros stands for one that is not known.
using PublicKey = std::array<std::uint8_t, 32>;
using PrivateKey = std::array<std::uint8_t, 32>;
inline bool is_known(const PublicKey& key) { return key != PublicKey{}; }
struct KeyPair {
  PrivateKey own{};
  PublicKey known{};
};

KeyPair new_key_pair();
PublicKey public_key_of(const PrivateKey& own);
// Returns the bytes that the owners of both keys have in common. Throws for a public key for which all have the same.
std::array<std::uint8_t, 32> common_bytes(const PrivateKey& own, const PublicKey& other);

// AES-128-GCM with one key. A nonce is used once for a key, by the side that seals. One thread at a time.
class Gcm {
 public:
  using Key = std::array<std::uint8_t, 16>;
  using Nonce = std::array<std::uint8_t, 12>;
  using Tag = std::array<std::uint8_t, 16>;

  explicit Gcm(const Key& key);

  // Returns the tag of bytes that stay readable (GMAC): by Ghash where the processor can.
  Tag tag_of(const Nonce& nonce, const void* data, std::size_t size);
  Tag tag_by_library(const Nonce& nonce, const void* data, std::size_t size);
  // Encrypts from `data` to `out`, which may be the same; returns the tag.
  Tag encrypt(const Nonce& nonce, const void* data, std::size_t size, void* out);
  // Decrypts in the same way. Returns false if the tag is not that of the bytes; `out` then holds nothing of use.
  bool decrypt(const Nonce& nonce, const void* data, std::size_t size, const Tag& tag, void* out);

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const;
  };
  using Context = std::unique_ptr<evp_cipher_ctx_st, Free>;
  void begin(const Nonce& nonce, bool encrypts);
  Tag finish();
  Ghash::Block encrypted(const Ghash::Block& block);

  Context context_;
  Context blocks_;  // encrypts single ones
  std::optional<Ghash> hash_;  // none: the library's
};

}  // namespace shoal

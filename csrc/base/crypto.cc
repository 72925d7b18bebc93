#include "base/crypto.h"

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace shoal {

namespace {

// The library cleans up nothing at exit: threads of engines that nobody has closed may still use it.
[[maybe_unused]] const int stays_at_exit = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

void require(bool succeeded, const char* what) {
  if (!succeeded) throw std::runtime_error(std::string("libcrypto fails: ") + what);
}

struct FreeKey {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(EVP_PKEY_CTX* context) const { EVP_PKEY_CTX_free(context); }
  void operator()(EVP_KDF_CTX* context) const { EVP_KDF_CTX_free(context); }
};
template <class T>
using Owned = std::unique_ptr<T, FreeKey>;

// Returns the library's form of a key, which takes as long to make as to use: each thread keeps its last one.
EVP_PKEY* private_key(const PrivateKey& own) {
  thread_local PrivateKey kept{};
  thread_local Owned<EVP_PKEY> key;
  if (key && kept == own) return key.get();
  key.reset(EVP_PKEY_new_raw_private_key(EVP_PKEY_X25519, nullptr, own.data(), own.size()));
  require(key != nullptr, "X25519's private key");
  kept = own;
  return key.get();
}

constexpr std::uint8_t kNothing = 0;  // where no bytes begin: the library takes a null pointer for an omission

template <class T>
OSSL_PARAM octets(const char* name, const T& bytes) {
  const void* const from = bytes.empty() ? &kNothing : static_cast<const void*>(bytes.data());
  return OSSL_PARAM_construct_octet_string(name, const_cast<void*>(from), bytes.size());
}

}  // namespace

// ---- digests --------------------------------------------------------------------------------------------

Digest sha256(std::span<const std::uint8_t> message) {
  Digest digest;
  require(EVP_Digest(message.data(), message.size(), digest.data(), nullptr, EVP_sha256(), nullptr) == 1, "SHA-256");
  return digest;
}

Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message) {
  Digest digest;
  const void* const from = key.empty() ? &kNothing : key.data();
  const auto* const made =
      HMAC(EVP_sha256(), from, static_cast<int>(key.size()), message.data(), message.size(), digest.data(), nullptr);
  require(made != nullptr, "HMAC");
  return digest;
}

bool equal_in_constant_time(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::vector<std::uint8_t> derived_bytes(std::span<const std::uint8_t> secret, std::span<const std::uint8_t> salt,
                                        std::string_view info, std::size_t count) {
  EVP_KDF* const hkdf = EVP_KDF_fetch(nullptr, "HKDF", nullptr);
  const Owned<EVP_KDF_CTX> context(EVP_KDF_CTX_new(hkdf));
  EVP_KDF_free(hkdf);
  char digest[] = "SHA256";
  const OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
                               octets(OSSL_KDF_PARAM_KEY, secret), octets(OSSL_KDF_PARAM_SALT, salt),
                               octets(OSSL_KDF_PARAM_INFO, info), OSSL_PARAM_construct_end()};
  std::vector<std::uint8_t> bytes(count);
  require(context && EVP_KDF_derive(context.get(), bytes.data(), count, params) == 1, "HKDF");
  return bytes;
}

// ---- X25519 ---------------------------------------------------------------------------------------------

KeyPair new_key_pair() {
  const Owned<EVP_PKEY> key(EVP_PKEY_Q_keygen(nullptr, nullptr, "X25519"));
  KeyPair pair;
  std::size_t size = pair.own.size();
  require(key && EVP_PKEY_get_raw_private_key(key.get(), pair.own.data(), &size) == 1, "X25519's keys");
  require(EVP_PKEY_get_raw_public_key(key.get(), pair.known.data(), &size) == 1, "X25519's keys");
  return pair;
}

PublicKey public_key_of(const PrivateKey& own) {
  PublicKey key;
  std::size_t size = key.size();
  require(EVP_PKEY_get_raw_public_key(private_key(own), key.data(), &size) == 1, "X25519's public key");
  return key;
}

std::array<std::uint8_t, 32> common_bytes(const PrivateKey& own, const PublicKey& other) {
  const Owned<EVP_PKEY> theirs(EVP_PKEY_new_raw_public_key(EVP_PKEY_X25519, nullptr, other.data(), other.size()));
  const Owned<EVP_PKEY_CTX> context(EVP_PKEY_CTX_new(private_key(own), nullptr));
  std::array<std::uint8_t, 32> common;
  std::size_t size = common.size();
  const bool made = theirs && context && EVP_PKEY_derive_init(context.get()) == 1 &&
                    EVP_PKEY_derive_set_peer(context.get(), theirs.get()) == 1 &&
                    EVP_PKEY_derive(context.get(), common.data(), &size) == 1;
  if (!made) throw std::runtime_error("the other side's public key is none");
  return common;
}

// ---- AES-GCM --------------------------------------------------------------------------------------------

void Gcm::Free::operator()(evp_cipher_ctx_st* context) const { EVP_CIPHER_CTX_free(context); }

Gcm::Gcm(const Key& key) : context_(EVP_CIPHER_CTX_new()), blocks_(EVP_CIPHER_CTX_new()) {
  require(context_ && EVP_CipherInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr, key.data(), nullptr, 1) == 1, "AES-GCM's key");
  require(blocks_ && EVP_CipherInit_ex(blocks_.get(), EVP_aes_128_ecb(), nullptr, key.data(), nullptr, 1) == 1, "AES's key");
  if (Ghash::is_supported()) hash_.emplace(encrypted({}));
}

Ghash::Block Gcm::encrypted(const Ghash::Block& block) {
  Ghash::Block out;
  int done = 0;
  require(EVP_EncryptUpdate(blocks_.get(), out.data(), &done, block.data(), static_cast<int>(block.size())) == 1, "AES");
  return out;
}

void Gcm::begin(const Nonce& nonce, bool encrypts) {
  require(EVP_CipherInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data(), encrypts) == 1, "AES-GCM's nonce");
}

Gcm::Tag Gcm::finish() {
  Tag tag;
  int size = 0;
  require(EVP_CipherFinal_ex(context_.get(), tag.data(), &size) == 1 &&
              EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, static_cast<int>(tag.size()), tag.data()) == 1,
          "AES-GCM's tag");
  return tag;
}

Gcm::Tag Gcm::tag_of(const Nonce& nonce, const void* data, std::size_t size) {
  if (!hash_) return tag_by_library(nonce, data, size);
  Ghash::Block first{};
  std::ranges::copy(nonce, first.begin());
  first.back() = 1;
  Tag tag = encrypted(first);
  const Ghash::Block hash = hash_->of(data, size);
  for (std::size_t k = 0; k < tag.size(); ++k) tag[k] ^= hash[k];
  return tag;
}

Gcm::Tag Gcm::tag_by_library(const Nonce& nonce, const void* data, std::size_t size) {
  begin(nonce, true);
  int done = 0;
  require(EVP_CipherUpdate(context_.get(), nullptr, &done, static_cast<const unsigned char*>(data), static_cast<int>(size)) == 1, "GMAC");
  return finish();
}

Gcm::Tag Gcm::encrypt(const Nonce& nonce, const void* data, std::size_t size, void* out) {
  begin(nonce, true);
  int done = 0;
  require(EVP_CipherUpdate(context_.get(), static_cast<unsigned char*>(out), &done, static_cast<const unsigned char*>(data),
                           static_cast<int>(size)) == 1,
          "AES-GCM");
  return finish();
}

bool Gcm::decrypt(const Nonce& nonce, const void* data, std::size_t size, const Tag& tag, void* out) {
  begin(nonce, false);
  int done = 0;
  require(EVP_CipherUpdate(context_.get(), static_cast<unsigned char*>(out), &done, static_cast<const unsigned char*>(data),
                           static_cast<int>(size)) == 1 &&
              EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, static_cast<int>(tag.size()),
                                  const_cast<std::uint8_t*>(tag.data())) == 1,
          "AES-GCM");
  std::array<unsigned char, 16> rest;
  return EVP_CipherFinal_ex(context_.get(), rest.data(), &done) == 1;
}

}  // namespace shoal

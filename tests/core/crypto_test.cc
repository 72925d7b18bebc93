#include "base/crypto.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"

namespace crypto_test {

using shoal::equal_in_constant_time;
using shoal::hmac_sha256;
using shoal::sha256;

std::vector<std::uint8_t> bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

std::vector<std::uint8_t> repeated(std::size_t n, std::uint8_t byte) {
  return std::vector<std::uint8_t>(n, byte);
}

std::string hex(std::span<const std::uint8_t> digest) {
  std::string text;
  for (std::uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// FIPS 180-4's examples: one block, two blocks, a million letters; and the empty message.
TEST(sha256_fips180_vectors) {
  CHECK_EQ(hex(sha256({})), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK_EQ(hex(sha256(bytes_of("abc"))), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK_EQ(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))),
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK_EQ(hex(sha256(repeated(1'000'000, 'a'))),
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// 55 bytes are the most that fit into one block with the padding, 56 need a second one, 64 fill the first.
TEST(sha256_at_the_edges_of_a_block) {
  const auto of = [](std::size_t n) { return hex(sha256(repeated(n, 'a'))); };
  CHECK_EQ(of(55), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  CHECK_EQ(of(56), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  CHECK_EQ(of(63), "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34");
  CHECK_EQ(of(64), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
  CHECK_EQ(of(65), "635361c48bb9eab14198e76ea8ab7f1a41685d6ad62aa9146d301d4f17eb0ae0");
}

// RFC 4231, test cases 1 to 4, 6 and 7 (5 is about a truncated result).
TEST(hmac_sha256_rfc4231_vectors) {
  CHECK_EQ(hex(hmac_sha256(repeated(20, 0x0b), bytes_of("Hi There"))),
           "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK_EQ(hex(hmac_sha256(bytes_of("Jefe"), bytes_of("what do ya want for nothing?"))),
           "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK_EQ(hex(hmac_sha256(repeated(20, 0xaa), repeated(50, 0xdd))),
           "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::vector<std::uint8_t> counting(25);
  for (std::size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::uint8_t>(i + 1);
  CHECK_EQ(hex(hmac_sha256(counting, repeated(50, 0xcd))),
           "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK_EQ(hex(hmac_sha256(repeated(131, 0xaa),
                           bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))),
           "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK_EQ(hex(hmac_sha256(repeated(131, 0xaa),
                           bytes_of("This is a test using a larger than block-size key and a larger than "
                                    "block-size data. The key needs to be hashed before being used by the "
                                    "HMAC algorithm."))),
           "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(equal_in_constant_time_sees_every_bit_and_length) {
  const auto right = sha256({});
  auto other = right;
  CHECK(equal_in_constant_time(right, other));
  for (std::size_t bit = 0; bit < 8 * other.size(); ++bit) {
    other[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    CHECK(!equal_in_constant_time(right, other));
    other[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
  }
  CHECK(!equal_in_constant_time(right, std::span(other).first(31)));
  CHECK(equal_in_constant_time({}, {}));
}

std::vector<std::uint8_t> from_hex(std::string_view text) {
  std::vector<std::uint8_t> bytes;
  for (std::size_t at = 0; at < text.size(); at += 2) {
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(std::string(text.substr(at, 2)), nullptr, 16)));
  }
  return bytes;
}

template <std::size_t kSize>
std::array<std::uint8_t, kSize> array_of(std::string_view text) {
  const auto bytes = from_hex(text);
  std::array<std::uint8_t, kSize> array{};
  CHECK_EQ(bytes.size(), kSize);
  std::copy_n(bytes.begin(), std::min(bytes.size(), kSize), array.begin());
  return array;
}

// RFC 5869, test cases 1 and 3 (without salt and info).
TEST(derived_bytes_rfc5869_vectors) {
  const auto info = from_hex("f0f1f2f3f4f5f6f7f8f9");
  const std::string_view text(reinterpret_cast<const char*>(info.data()), info.size());
  CHECK_EQ(hex(shoal::derived_bytes(repeated(22, 0x0b), from_hex("000102030405060708090a0b0c"), text, 42)),
           "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865");
  CHECK_EQ(hex(shoal::derived_bytes(repeated(22, 0x0b), {}, "", 42)),
           "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8");
}

// RFC 7748, section 6.1.
TEST(x25519_rfc7748_vectors) {
  const auto alice = array_of<32>("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a");
  const auto bob = array_of<32>("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb");
  CHECK_EQ(hex(shoal::public_key_of(alice)), "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a");
  CHECK_EQ(hex(shoal::public_key_of(bob)), "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f");
  const std::string common = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742";
  CHECK_EQ(hex(shoal::common_bytes(alice, shoal::public_key_of(bob))), common);
  CHECK_EQ(hex(shoal::common_bytes(bob, shoal::public_key_of(alice))), common);
}

TEST(x25519_refuses_a_public_key_for_which_all_have_the_same_bytes) {
  const shoal::KeyPair mine = shoal::new_key_pair();
  CHECK(mine.known == shoal::public_key_of(mine.own));
  CHECK(mine.known != shoal::new_key_pair().known);
  for (const std::uint8_t first : {0, 1}) {
    shoal::PublicKey none{};
    none[0] = first;
    CHECK(contains(CHECK_THROWS(std::runtime_error, shoal::common_bytes(mine.own, none)), "public key is none"));
  }
}

// A text alone: test case 3 of the specification of GCM. Data that stays readable: NIST's validation, gcmEncryptExtIV128.
TEST(gcm_nist_vectors) {
  const auto key = array_of<16>("feffe9928665731c6d6a8f9467308308");
  const auto nonce = array_of<12>("cafebabefacedbaddecaf888");
  const auto text = from_hex(
      "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255");
  shoal::Gcm gcm(key);
  std::vector<std::uint8_t> sealed(text.size()), opened(text.size());
  for (int round = 0; round < 2; ++round) {  // its state is of one call alone
    const auto tag = gcm.encrypt(nonce, text.data(), text.size(), sealed.data());
    CHECK_EQ(hex(tag), "4d5c2af327cd64a62cf35abd2ba6fab4");
    CHECK_EQ(hex(sealed),
             "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091473f5985");
    CHECK(gcm.decrypt(nonce, sealed.data(), sealed.size(), tag, opened.data()));
    CHECK(opened == text);
  }
  shoal::Gcm other(array_of<16>("77be63708971c4e240d1cb79e8d77feb"));
  const auto readable = from_hex("7a43ec1d9c0a5a78a0b16533a6213cab");
  CHECK_EQ(hex(other.tag_of(array_of<12>("e0e00f19fed7ba0136a797f3"), readable.data(), readable.size())), "209fcc8d3675ed938e9c7166709dd946");
}

// All remainders of the loop, and every place in a block where the bytes begin and end.
TEST(gcm_tags_are_the_librarys_at_every_length_and_alignment) {
  std::uint32_t state = 1;
  std::vector<std::uint8_t> bytes(5000);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  for (int key = 0; key < 4; ++key) {  // of both values of the highest bit of the subkey
    shoal::Gcm gcm(array_of<16>("0001020304050607f8090a0b0c0d0e0" + std::to_string(key)));
    auto nonce = array_of<12>("000102030405060708090a0b");
    for (std::size_t size = 0; size <= 1300; ++size) {
      nonce[0] = static_cast<std::uint8_t>(size);
      const auto* const at = bytes.data() + size % 67;
      CHECK(gcm.tag_of(nonce, at, size) == gcm.tag_by_library(nonce, at, size));
    }
    CHECK(gcm.tag_of(nonce, bytes.data(), bytes.size()) == gcm.tag_by_library(nonce, bytes.data(), bytes.size()));
  }
}

TEST(gcm_sees_every_flipped_bit_and_another_nonce) {
  const auto nonce = array_of<12>("000000000000000000000001");
  shoal::Gcm gcm(array_of<16>("000102030405060708090a0b0c0d0e0f"));
  const std::vector<std::uint8_t> text = repeated(40, 3);
  std::vector<std::uint8_t> sealed(text.size()), opened(text.size());
  const auto tag = gcm.encrypt(nonce, text.data(), text.size(), sealed.data());
  for (std::size_t bit = 0; bit < 8 * (sealed.size() + tag.size()); ++bit) {
    auto bytes = sealed;
    auto its_tag = tag;
    auto& changed = bit / 8 < bytes.size() ? bytes[bit / 8] : its_tag[bit / 8 - bytes.size()];
    changed ^= static_cast<std::uint8_t>(1u << (bit % 8));
    CHECK(!gcm.decrypt(nonce, bytes.data(), bytes.size(), its_tag, opened.data()));
  }
  CHECK(!gcm.decrypt(array_of<12>("000000000000000000000002"), sealed.data(), sealed.size(), tag, opened.data()));
  CHECK(gcm.decrypt(nonce, sealed.data(), sealed.size(), tag, sealed.data()));  // in place
  CHECK(sealed == text);
  CHECK(gcm.tag_of(nonce, text.data(), text.size()) != gcm.tag_of(nonce, text.data(), text.size() - 1));
}

}  // namespace crypto_test

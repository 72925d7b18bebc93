#include "base/sha256.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"

namespace sha256_test {

using shoal::equal_in_constant_time;
using shoal::hmac_sha256;
using shoal::sha256;

std::vector<std::uint8_t> bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

std::vector<std::uint8_t> repeated(std::size_t n, std::uint8_t byte) {
  return std::vector<std::uint8_t>(n, byte);
}

std::string hex(const shoal::Digest& digest) {
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

}  // namespace sha256_test

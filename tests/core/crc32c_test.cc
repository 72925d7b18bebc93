#include "base/crc32c.h"

#include <cstdint>
#include <random>
#include <vector>

#include "check.h"

namespace crc32c_test {

using shoal::crc32c;
using shoal::crc32c_by_table;

// The definition, bit by bit: the polynomial's remainder of the message, reflected, inverted at both ends.
std::uint32_t by_definition(const std::vector<std::uint8_t>& bytes) {
  std::uint32_t crc = 0xffffffff;
  for (std::uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0x82f63b78 & -(crc & 1));
  }
  return ~crc;
}

std::vector<std::uint8_t> random_bytes(std::size_t n, std::mt19937_64& random) {
  std::vector<std::uint8_t> bytes(n);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

// RFC 3720, appendix B.4; the RFC prints the four bytes in the order of the wire.
TEST(crc32c_rfc3720_vectors) {
  std::vector<std::uint8_t> bytes(32, 0);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x8a9136aau);
  bytes.assign(32, 0xff);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x62a8ab43u);
  for (std::uint8_t i = 0; i < 32; ++i) bytes[i] = i;
  CHECK_EQ(crc32c(bytes.data(), 32), 0x46dd794eu);
  for (std::uint8_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::uint8_t>(31 - i);
  CHECK_EQ(crc32c(bytes.data(), 32), 0x113fdb5cu);
  const std::uint8_t read_command[48] = {
      0x01, 0xc0, 0, 0, 0, 0, 0, 0,    0, 0, 0,    0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0,    0x04, 0,
      0,    0,    0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0,    0,    0};
  CHECK_EQ(crc32c(read_command, 48), 0xd9963a56u);
  CHECK_EQ(crc32c("123456789", 9), 0xe3069283u);  // the check value of the catalogues
}

TEST(crc32c_of_nothing_is_the_seed) {
  CHECK_EQ(crc32c(nullptr, 0), 0u);
  CHECK_EQ(crc32c(nullptr, 0, 0x12345678), 0x12345678u);
  CHECK_EQ(crc32c_by_table(nullptr, 0, 0x12345678), 0x12345678u);
}

// Around the lengths at which the fast one changes its loop: 8, 3 x 256, 3 x 4096.
TEST(crc32c_fast_table_and_definition_agree_at_every_boundary) {
  std::mt19937_64 random(1);
  for (std::size_t around : {0, 8, 16, 768, 1536, 12288, 12288 + 768, 24576}) {
    for (std::size_t n = around < 9 ? 0 : around - 9; n <= around + 9; ++n) {
      const auto bytes = random_bytes(n, random);
      const std::uint32_t expected = by_definition(bytes);
      CHECK_EQ(crc32c(bytes.data(), n), expected);
      CHECK_EQ(crc32c_by_table(bytes.data(), n), expected);
    }
  }
}

TEST(crc32c_fast_and_table_agree_on_random_lengths_alignments_and_seeds) {
  std::mt19937_64 random(2);
  const auto bytes = random_bytes(100'000, random);
  for (int i = 0; i < 500; ++i) {
    const std::size_t begin = random() % 64, n = random() % (i % 10 == 0 ? 99'000 : 2'000);
    const auto seed = static_cast<std::uint32_t>(random());
    CHECK_EQ(crc32c(bytes.data() + begin, n, seed), crc32c_by_table(bytes.data() + begin, n, seed));
  }
}

TEST(crc32c_in_pieces_is_that_of_the_whole) {
  std::mt19937_64 random(3);
  const auto bytes = random_bytes(50'000, random);
  const std::uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (int i = 0; i < 50; ++i) {
    std::uint32_t crc = 0;
    for (std::size_t done = 0; done < bytes.size();) {
      const std::size_t n = std::min<std::size_t>(1 + random() % 20'000, bytes.size() - done);
      crc = crc32c(bytes.data() + done, n, crc);
      done += n;
    }
    CHECK_EQ(crc, whole);
  }
}

TEST(crc32c_sees_every_single_flipped_bit) {
  std::mt19937_64 random(4);
  auto bytes = random_bytes(1'000, random);
  const std::uint32_t right = crc32c(bytes.data(), bytes.size());
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    CHECK(crc32c(bytes.data(), bytes.size()) != right);
    bytes[bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
  }
}

}  // namespace crc32c_test

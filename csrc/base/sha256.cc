#include "base/sha256.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

namespace shoal {
namespace {

constexpr std::size_t kBlockBytes = 64;

// floor(frac(root(n)) * 2^32) of the first primes: FIPS 180-4, sections 4.2.2 (cube roots) and 5.3.3 (square roots),
// computed in integers: the largest x with x^power <= prime * 2^(32 power), without its integer part.
constexpr std::uint32_t fraction_of_root(std::uint32_t prime, int power) {
  __extension__ using Wide = unsigned __int128;
  std::uint64_t root = 0;
  for (int bit = 36; bit >= 0; --bit) {
    const std::uint64_t tried = root | (std::uint64_t{1} << bit);
    Wide product = static_cast<Wide>(tried) * tried;
    if (power == 3) product *= tried;  // below 2^111
    if (product <= static_cast<Wide>(prime) << (32 * power)) root = tried;
  }
  return static_cast<std::uint32_t>(root);
}

template <std::size_t count>
constexpr std::array<std::uint32_t, count> root_constants(int power) {
  std::array<std::uint32_t, count> constants{};
  std::uint32_t candidate = 2;
  for (std::uint32_t& constant : constants) {
    for (;; ++candidate) {
      bool prime = true;
      for (std::uint32_t d = 2; d * d <= candidate; ++d) prime = prime && candidate % d != 0;
      if (prime) break;
    }
    constant = fraction_of_root(candidate++, power);
  }
  return constants;
}

constexpr std::array<std::uint32_t, 64> kRound = root_constants<64>(3);
constexpr std::array<std::uint32_t, 8> kStart = root_constants<8>(2);

class Sha256 {
 public:
  void add(std::span<const std::uint8_t> bytes) {
    length_ += bytes.size();
    while (!bytes.empty()) {
      const std::size_t taken = std::min(bytes.size(), kBlockBytes - filled_);
      std::memcpy(block_.data() + filled_, bytes.data(), taken);
      filled_ += taken;
      bytes = bytes.subspan(taken);
      if (filled_ == kBlockBytes) take_block();
    }
  }

  Digest finish() {
    const std::uint64_t bits = length_ * 8;
    block_[filled_++] = 0x80;
    if (filled_ > kBlockBytes - 8) {
      std::fill(block_.begin() + filled_, block_.end(), std::uint8_t{0});
      take_block();
    }
    std::fill(block_.begin() + filled_, block_.end(), std::uint8_t{0});
    for (int i = 0; i < 8; ++i) block_[kBlockBytes - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
    take_block();
    Digest digest;
    for (std::size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  void take_block() {
    using std::rotr;
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) {
      const std::uint8_t* at = block_.data() + 4 * i;
      w[i] = std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
    }
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + w[i - 7];
      w[i] += (rotr(x, 7) ^ rotr(x, 18) ^ (x >> 3)) + (rotr(y, 17) ^ rotr(y, 19) ^ (y >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t chosen = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
      const std::uint32_t first = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + chosen + kRound[i] + w[i];
      const std::uint32_t second = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + majority;
      h = g, g = f, f = e, e = d + first;
      d = c, c = b, b = a, a = first + second;
    }
    const std::array<std::uint32_t, 8> sums{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += sums[i];
    filled_ = 0;
  }

  std::array<std::uint32_t, 8> state_ = kStart;
  std::array<std::uint8_t, kBlockBytes> block_{};
  std::size_t filled_ = 0;
  std::uint64_t length_ = 0;
};

}  // namespace

Digest sha256(std::span<const std::uint8_t> message) {
  Sha256 hash;
  hash.add(message);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::uint8_t> key, std::span<const std::uint8_t> message) {
  std::array<std::uint8_t, kBlockBytes> padded{};
  if (key.size() > kBlockBytes) {
    const Digest digest = sha256(key);
    std::copy(digest.begin(), digest.end(), padded.begin());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  std::array<std::uint8_t, kBlockBytes> inner_pad, outer_pad;
  for (std::size_t i = 0; i < kBlockBytes; ++i) {
    inner_pad[i] = padded[i] ^ 0x36;
    outer_pad[i] = padded[i] ^ 0x5c;
  }
  Sha256 inner, outer;
  inner.add(inner_pad);
  inner.add(message);
  outer.add(outer_pad);
  outer.add(inner.finish());
  return outer.finish();
}

bool equal_in_constant_time(std::span<const std::uint8_t> a, std::span<const std::uint8_t> b) {
  if (a.size() != b.size()) return false;
  // volatile: the compiler must not exit the loop at the first difference.
  volatile std::uint8_t difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i) difference = difference | (a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace shoal

#include "base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace shoal {
namespace {

using Table = std::array<std::uint32_t, 256>;
// A linear function of 32 bits, as one table per byte.
using Operator = std::array<Table, 4>;

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // 0x1edc6f41 with its bits reversed

// The register after one zero byte, for each value of its lowest byte.
constexpr Table byte_table() {
  Table table{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    std::uint32_t crc = value;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[value] = crc;
  }
  return table;
}

// tables[i][value]: byte_table followed by i zero bytes. Eight bytes are eight independent lookups.
constexpr std::array<Table, 8> slicing_tables() {
  std::array<Table, 8> tables{};
  tables[0] = byte_table();
  for (std::size_t i = 1; i < 8; ++i) {
    for (std::size_t value = 0; value < 256; ++value) {
      const std::uint32_t before = tables[i - 1][value];
      tables[i][value] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> kTables = slicing_tables();

// Both take and return the raw register, without the inversions at the two ends.
std::uint32_t step_by_byte(std::uint32_t crc, const unsigned char* at, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) crc = (crc >> 8) ^ kTables[0][(crc ^ at[i]) & 0xff];
  return crc;
}

std::uint32_t step_by_table(std::uint32_t crc, const unsigned char* at, std::size_t n) {
  if constexpr (std::endian::native == std::endian::little) {
    for (; n >= 8; at += 8, n -= 8) {
      std::uint32_t low, high;
      std::memcpy(&low, at, 4);
      std::memcpy(&high, at + 4, 4);
      low ^= crc;
      crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
            kTables[4][low >> 24] ^ kTables[3][high & 0xff] ^ kTables[2][(high >> 8) & 0xff] ^
            kTables[1][(high >> 16) & 0xff] ^ kTables[0][high >> 24];
    }
  }
  return step_by_byte(crc, at, n);
}

#if defined(__x86_64__)

// The instruction has a latency of three cycles and a throughput of one per cycle: three interleaved streams keep it
// busy. Their registers are combined by shifting the earlier ones over the zeros in place of the later ones.
constexpr std::size_t kLong = 4096, kShort = 256;  // bytes of one stream

constexpr std::uint32_t apply(const Operator& shift, std::uint32_t crc) {
  return shift[0][crc & 0xff] ^ shift[1][(crc >> 8) & 0xff] ^ shift[2][(crc >> 16) & 0xff] ^
         shift[3][crc >> 24];
}

// The register after `num_bytes` (a power of two) zero bytes, by doubling: 2n zeros are n zeros twice.
Operator shift_over_zeros(std::size_t num_bytes) {
  Operator shift{};
  for (std::uint32_t value = 0; value < 256; ++value) {
    for (int byte = 0; byte < 4; ++byte) {
      const std::uint32_t crc = value << (8 * byte);
      shift[byte][value] = (crc >> 8) ^ kTables[0][crc & 0xff];
    }
  }
  for (std::size_t done = 1; done < num_bytes; done *= 2) {
    Operator twice{};
    for (std::size_t byte = 0; byte < 4; ++byte) {
      for (std::size_t value = 0; value < 256; ++value) twice[byte][value] = apply(shift, shift[byte][value]);
    }
    shift = twice;
  }
  return shift;
}

[[gnu::target("sse4.2")]] inline std::uint64_t step_word(std::uint64_t crc, const unsigned char* at) {
  std::uint64_t word;
  std::memcpy(&word, at, 8);
  return _mm_crc32_u64(crc, word);
}

// Three streams of `length` bytes each.
[[gnu::target("sse4.2")]] inline std::uint32_t step_three(std::uint32_t crc, const unsigned char* at,
                                                          std::size_t length, const Operator& shift) {
  std::uint64_t first = crc, second = 0, third = 0;
  for (std::size_t i = 0; i < length; i += 8) {
    first = step_word(first, at + i);
    second = step_word(second, at + length + i);
    third = step_word(third, at + 2 * length + i);
  }
  const auto narrow = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
  return apply(shift, apply(shift, narrow(first)) ^ narrow(second)) ^ narrow(third);
}

[[gnu::target("sse4.2")]] std::uint32_t step_by_instruction(std::uint32_t crc, const unsigned char* at,
                                                            std::size_t n) {
  static const Operator over_long = shift_over_zeros(kLong), over_short = shift_over_zeros(kShort);
  for (; n >= 3 * kLong; at += 3 * kLong, n -= 3 * kLong) crc = step_three(crc, at, kLong, over_long);
  for (; n >= 3 * kShort; at += 3 * kShort, n -= 3 * kShort) crc = step_three(crc, at, kShort, over_short);
  std::uint64_t wide = crc;
  for (; n >= 8; at += 8, n -= 8) wide = step_word(wide, at);
  crc = static_cast<std::uint32_t>(wide);
  for (; n > 0; ++at, --n) crc = _mm_crc32_u8(crc, *at);
  return crc;
}

bool has_instruction() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") != 0;
  }();
  return has;
}

#endif  // __x86_64__

}  // namespace

std::uint32_t crc32c_by_table(const void* data, std::size_t n, std::uint32_t seed) {
  return ~step_by_table(~seed, static_cast<const unsigned char*>(data), n);
}

std::uint32_t crc32c(const void* data, std::size_t n, std::uint32_t seed) {
#if defined(__x86_64__)
  if (has_instruction()) return ~step_by_instruction(~seed, static_cast<const unsigned char*>(data), n);
#endif
  return crc32c_by_table(data, n, seed);
}

}  // namespace shoal

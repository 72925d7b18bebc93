#include "base/ghash.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {

#if defined(__x86_64__)

namespace {

// Blocks are kept with their bytes reversed and the subkey multiplied by x: bits then have their natural order, and a
// product is reduced from below, as in POLYVAL (RFC 8452, appendix A).
#define SHOAL_GHASH gnu::target("avx512f,avx512bw,avx512vl,pclmul,vpclmulqdq"), gnu::always_inline

constexpr std::size_t kVector = 64, kVectors = 8, kRound = kVector * kVectors;  // bytes of a round of the loop

// Products of four pairs of blocks, not yet reduced: a sum of many is reduced once.
struct Products {
  __m512i low, middle, high;
};

[[SHOAL_GHASH]] inline void add_products(Products& to, __m512i a, __m512i b) {
  to.low = _mm512_xor_si512(to.low, _mm512_clmulepi64_epi128(a, b, 0x00));
  to.high = _mm512_xor_si512(to.high, _mm512_clmulepi64_epi128(a, b, 0x11));
  const __m512i crossed = _mm512_xor_si512(_mm512_clmulepi64_epi128(a, b, 0x01), _mm512_clmulepi64_epi128(a, b, 0x10));
  to.middle = _mm512_xor_si512(to.middle, crossed);
}

// Returns the products modulo x^128 + x^127 + x^126 + x^121 + 1, divided by x^128.
[[SHOAL_GHASH]] inline __m512i reduced(const Products& of) {
  const __m512i modulus = _mm512_set1_epi64(static_cast<long long>(0xc200000000000000u));
  __m512i low = _mm512_xor_si512(of.low, _mm512_bslli_epi128(of.middle, 8));
  const __m512i high = _mm512_xor_si512(of.high, _mm512_bsrli_epi128(of.middle, 8));
  for (int half = 0; half < 2; ++half) {
    const __m512i swapped = _mm512_shuffle_epi32(low, _MM_PERM_BADC);
    low = _mm512_xor_si512(swapped, _mm512_clmulepi64_epi128(low, modulus, 0x00));
  }
  return _mm512_xor_si512(high, low);
}

[[SHOAL_GHASH]] inline __m512i reversed(__m512i blocks) {
  const __m128i order = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_shuffle_epi8(blocks, _mm512_broadcast_i32x4(order));
}

[[SHOAL_GHASH]] inline __m512i powers_at(const Ghash::Block* power) { return _mm512_loadu_si512(power->data()); }

// One power for all four blocks.
[[SHOAL_GHASH]] inline __m512i power_at(const Ghash::Block* power) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(power->data())));
}

[[SHOAL_GHASH]] inline __m128i sum_of_four(__m512i blocks) {
  const __m256i two = _mm256_xor_si256(_mm512_castsi512_si256(blocks), _mm512_extracti64x4_epi64(blocks, 1));
  return _mm_xor_si128(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

// The subkey with its bytes reversed, times x.
[[SHOAL_GHASH]] inline __m128i prepared(const Ghash::Block& subkey) {
  std::uint64_t words[2];
  Ghash::Block back = subkey;
  std::ranges::reverse(back);
  __builtin_memcpy(words, back.data(), sizeof words);
  const std::uint64_t carry = 0 - (words[1] >> 63);  // without a branch on the key
  const std::uint64_t high = words[1] << 1 | words[0] >> 63, low = words[0] << 1;
  return _mm_set_epi64x(static_cast<long long>(high ^ (carry & 0xc200000000000000u)), static_cast<long long>(low ^ (carry & 1)));
}

[[gnu::target("avx512f,avx512bw,avx512vl,pclmul,vpclmulqdq")]] void fill_powers(const Ghash::Block& subkey, Ghash::Block* first,
                                                                                std::size_t count) {
  const __m128i one = prepared(subkey);
  __m128i power = one;
  for (std::size_t k = count; k-- > 0;) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(first[k].data()), power);
    Products next{};
    add_products(next, _mm512_zextsi128_si512(power), _mm512_zextsi128_si512(one));
    power = _mm512_castsi512_si128(reduced(next));
  }
}

// `end`: behind the first power.
[[gnu::target("avx512f,avx512bw,avx512vl,pclmul,vpclmulqdq")]] Ghash::Block hash(const unsigned char* at, std::size_t size,
                                                                                 const Ghash::Block* end) {
  const std::uint64_t bits = 8 * static_cast<std::uint64_t>(size);
  __m512i sums = _mm512_setzero_si512();  // of every fourth block
  for (; size >= kRound + kVector; at += kRound, size -= kRound) {  // a vector is left: it takes up the sums
    Products products{};
    for (std::size_t k = 0; k < kVectors; ++k) {
      __m512i blocks = reversed(_mm512_loadu_si512(at + k * kVector));
      if (k == 0) blocks = _mm512_xor_si512(blocks, sums);
      add_products(products, blocks, power_at(end - 4 * (kVectors - k)));
    }
    sums = reduced(products);
  }
  const Ghash::Block* power = end - (size + 15) / 16 - 1;
  Products products{};
  for (; size > 0; at += kVector, power += 4) {
    const std::size_t taken = std::min(size, kVector);
    const __m512i blocks = reversed(_mm512_maskz_loadu_epi8(~__mmask64{0} >> (kVector - taken), at));
    add_products(products, _mm512_xor_si512(blocks, sums), powers_at(power));
    sums = _mm512_setzero_si512();
    size -= taken;
  }
  const __m128i length = _mm_set_epi64x(static_cast<long long>(bits), 0);
  add_products(products, _mm512_zextsi128_si512(length), powers_at(end - 1));
  const __m128i sum = sum_of_four(reduced(products));
  Ghash::Block block;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(block.data()), _mm512_castsi512_si128(reversed(_mm512_zextsi128_si512(sum))));
  return block;
}

}  // namespace

bool Ghash::is_supported() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul");
  }();
  return has;
}

Ghash::Ghash(const Block& subkey) { fill_powers(subkey, powers_.data(), kPowers); }

Ghash::Block Ghash::of(const void* data, std::size_t size) const {
  return hash(static_cast<const unsigned char*>(data), size, powers_.data() + kPowers);
}

#else

bool Ghash::is_supported() { return false; }
Ghash::Ghash(const Block&) {}
Ghash::Block Ghash::of(const void*, std::size_t) const { return {}; }

#endif  // __x86_64__

}  // namespace shoal

// Vectors of sixteen floats, in three namespaces with the same functions: portable (the compiler's vector extensions:
// SSE2 on x86-64, NEON on arm64), avx2 and avx512. A kernel is written once in a .inc file that is included once per
// level. All levels give the same bits: each operation is one IEEE operation, and a stored NaN is always the quiet
// NaN without payload, since the payload that survives an addition would depend on the operand order that the
// compiler chose.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {

inline constexpr std::size_t kUnit = 16;

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

namespace portable {

#define SHOAL_OP [[gnu::always_inline]] inline

typedef float Float4 __attribute__((vector_size(16)));
typedef std::int32_t Int4 __attribute__((vector_size(16)));
typedef std::uint32_t Uint4 __attribute__((vector_size(16)));
typedef std::uint16_t Ushort4 __attribute__((vector_size(8)));

struct F {
  Float4 part[4];
};

template <class To, class From>
SHOAL_OP To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
template <class Function>
SHOAL_OP F each(Function function) {
  return {function(0), function(1), function(2), function(3)};
}
SHOAL_OP Float4 load4(const float* at) {
  Float4 x;
  std::memcpy(&x, at, sizeof(x));
  return x;
}
SHOAL_OP Uint4 load4(const std::uint16_t* at) {
  Ushort4 x;
  std::memcpy(&x, at, sizeof(x));
  return __builtin_convertvector(x, Uint4);
}
SHOAL_OP void store4(float* at, Float4 x) { std::memcpy(at, &x, sizeof(x)); }
SHOAL_OP void store4(std::uint16_t* at, Uint4 x) {
  const Ushort4 narrow = __builtin_convertvector(x, Ushort4);
  std::memcpy(at, &narrow, sizeof(narrow));
}
SHOAL_OP Uint4 select(Int4 condition, Uint4 yes, Uint4 no) {
  const Uint4 mask = as<Uint4>(condition);
  return (yes & mask) | (no & ~mask);
}

SHOAL_OP Float4 from_half(Uint4 half) {
  const Uint4 sign = (half & 0x8000u) << 16, exponent = (half >> 10) & 31u, mantissa = half & 0x3ffu;
  const Uint4 normal = ((exponent + 112u) << 23) | (mantissa << 13);
  const Uint4 infinite_or_nan = (mantissa << 13) | 0x7f800000u;
  const Float4 small = __builtin_convertvector(as<Int4>(mantissa), Float4) * 0x1p-24f;  // exact
  Uint4 bits = select(exponent == 0u, as<Uint4>(small), normal);
  bits = select(exponent == 31u, infinite_or_nan, bits);
  return as<Float4>(bits | sign);
}
SHOAL_OP Uint4 to_half(Float4 x) {  // nearest, ties to even
  const Uint4 bits = as<Uint4>(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  const Uint4 rebased = size - (112u << 23);
  const Uint4 normal = (rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13;
  // Floats in [0.5, 1) have a spacing of 2^-24, the smallest half: the addition rounds to it.
  const Uint4 small = as<Uint4>(as<Float4>(size) + 0.5f) - 0x3f000000u;
  const Int4 signed_size = as<Int4>(size);
  Uint4 half = select(signed_size < 0x38800000, small, normal);
  half = select(signed_size >= 0x477ff000, Uint4{} + 0x7c00u, half);  // 65,520 and above round to infinity
  return select(signed_size > 0x7f800000, Uint4{} + 0x7e00u, half | sign);
}
SHOAL_OP Uint4 to_bfloat(Float4 x) {  // nearest, ties to even
  const Uint4 bits = as<Uint4>(x);
  const Uint4 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return select(as<Int4>(bits & 0x7fffffffu) > 0x7f800000, Uint4{} + 0x7fc0u, rounded);
}

SHOAL_OP F set(float x) {
  const Float4 all = Float4{} + x;
  return {all, all, all, all};
}
SHOAL_OP F add(const F& x, const F& y) {
  return each([&](int i) { return x.part[i] + y.part[i]; });
}
SHOAL_OP F sub(const F& x, const F& y) {
  return each([&](int i) { return x.part[i] - y.part[i]; });
}
SHOAL_OP F mul(const F& x, const F& y) {
  return each([&](int i) { return x.part[i] * y.part[i]; });
}
SHOAL_OP F div(const F& x, const F& y) {
  return each([&](int i) { return x.part[i] / y.part[i]; });
}
SHOAL_OP F fused(const F& x, const F& y, const F& z) {  // x y + z, rounded once
  return each([&](int i) {
    const Float4 p = x.part[i], q = y.part[i], r = z.part[i];
    return Float4{std::fma(p[0], q[0], r[0]), std::fma(p[1], q[1], r[1]), std::fma(p[2], q[2], r[2]),
                  std::fma(p[3], q[3], r[3])};
  });
}
SHOAL_OP F root(const F& x) {
  return each([&](int i) {
    const Float4 p = x.part[i];
    return Float4{std::sqrt(p[0]), std::sqrt(p[1]), std::sqrt(p[2]), std::sqrt(p[3])};
  });
}
SHOAL_OP F load(const float* at) {
  return each([&](int i) { return load4(at + 4 * i); });
}
SHOAL_OP F load(const Bf16* at) {
  return each([&](int i) { return as<Float4>(load4(&at->bits + 4 * i) << 16); });
}
SHOAL_OP F load(const Fp16* at) {
  return each([&](int i) { return from_half(load4(&at->bits + 4 * i)); });
}
SHOAL_OP F quiet(const F& x) {
  return each([&](int i) {
    return as<Float4>(select(x.part[i] == x.part[i], as<Uint4>(x.part[i]), Uint4{} + 0x7fc00000u));
  });
}
SHOAL_OP void store(float* at, const F& x) {
  for (int i = 0; i < 4; ++i) store4(at + 4 * i, x.part[i]);
}
SHOAL_OP void store(Bf16* at, const F& x) {
  for (int i = 0; i < 4; ++i) store4(&at->bits + 4 * i, to_bfloat(x.part[i]));
}
SHOAL_OP void store(Fp16* at, const F& x) {
  for (int i = 0; i < 4; ++i) store4(&at->bits + 4 * i, to_half(x.part[i]));
}
// Streaming store where the processor has it (at is aligned to the size of a unit).
template <class T>
SHOAL_OP void stream(T* at, const F& x) {
  store(at, x);
}

#undef SHOAL_OP
}  // namespace portable

#if defined(__x86_64__)

namespace avx2 {

#define SHOAL_OP [[gnu::always_inline, gnu::target("avx2,fma,f16c")]] inline

struct F {
  __m256 low, high;
};

SHOAL_OP F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SHOAL_OP F add(F x, F y) { return {_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)}; }
SHOAL_OP F sub(F x, F y) { return {_mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)}; }
SHOAL_OP F mul(F x, F y) { return {_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)}; }
SHOAL_OP F div(F x, F y) { return {_mm256_div_ps(x.low, y.low), _mm256_div_ps(x.high, y.high)}; }
SHOAL_OP F fused(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}
SHOAL_OP F root(F x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }
SHOAL_OP F load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
SHOAL_OP __m256 widen(const Bf16* at) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
SHOAL_OP __m256 widen(const Fp16* at) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}
SHOAL_OP F load(const Bf16* at) { return {widen(at), widen(at + 8)}; }
SHOAL_OP F load(const Fp16* at) { return {widen(at), widen(at + 8)}; }
SHOAL_OP __m256 quiet(__m256 x) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
SHOAL_OP F quiet(F x) { return {quiet(x.low), quiet(x.high)}; }
SHOAL_OP __m256i round_to_bfloat(__m256 x) {  // of a quiet NaN or a number: 32-bit lanes below 2^16
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
}
SHOAL_OP __m256i pack(Bf16, F x) {
  const F q = quiet(x);
  const __m256i mixed = _mm256_packus_epi32(round_to_bfloat(q.low), round_to_bfloat(q.high));
  return _mm256_permute4x64_epi64(mixed, 0xd8);
}
SHOAL_OP __m256i pack(Fp16, F x) {
  const F q = quiet(x);
  return _mm256_set_m128i(_mm256_cvtps_ph(q.high, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(q.low, _MM_FROUND_TO_NEAREST_INT));
}
SHOAL_OP void store(float* at, F x) {
  _mm256_storeu_ps(at, x.low);
  _mm256_storeu_ps(at + 8, x.high);
}
template <class T>
SHOAL_OP void store(T* at, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), pack(T{}, x));
}
SHOAL_OP void stream(float* at, F x) {
  _mm256_stream_ps(at, x.low);
  _mm256_stream_ps(at + 8, x.high);
}
template <class T>
SHOAL_OP void stream(T* at, F x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at), pack(T{}, x));
}

#undef SHOAL_OP
}  // namespace avx2

namespace avx512 {

#define SHOAL_OP [[gnu::always_inline, gnu::target("avx512f")]] inline

using F = __m512;

SHOAL_OP F set(float x) { return _mm512_set1_ps(x); }
SHOAL_OP F add(F x, F y) { return _mm512_add_ps(x, y); }
SHOAL_OP F sub(F x, F y) { return _mm512_sub_ps(x, y); }
SHOAL_OP F mul(F x, F y) { return _mm512_mul_ps(x, y); }
SHOAL_OP F div(F x, F y) { return _mm512_div_ps(x, y); }
SHOAL_OP F fused(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
SHOAL_OP F root(F x) { return _mm512_sqrt_ps(x); }
SHOAL_OP F load(const float* at) { return _mm512_loadu_ps(at); }
SHOAL_OP F load(const Bf16* at) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
SHOAL_OP F load(const Fp16* at) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}
SHOAL_OP F quiet(F x) {
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, nan);
}
SHOAL_OP __m256i pack(Bf16, F x) {  // not vcvtneps2bf16, which flushes subnormal numbers to zero
  const __m512i bits = _mm512_castps_si512(quiet(x));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16));
}
SHOAL_OP __m256i pack(Fp16, F x) { return _mm512_cvtps_ph(quiet(x), _MM_FROUND_TO_NEAREST_INT); }
SHOAL_OP void store(float* at, F x) { _mm512_storeu_ps(at, x); }
template <class T>
SHOAL_OP void store(T* at, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), pack(T{}, x));
}
SHOAL_OP void stream(float* at, F x) { _mm512_stream_ps(at, x); }
template <class T>
SHOAL_OP void stream(T* at, F x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(at), pack(T{}, x));
}

#undef SHOAL_OP
}  // namespace avx512

#endif  // __x86_64__

}  // namespace shoal

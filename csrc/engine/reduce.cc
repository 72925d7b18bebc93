#include "engine/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "base/copy.h"
#include "base/parallel.h"
#include "base/simd.h"

namespace shoal {

// ---- sums by vector kernels -----------------------------------------------------------------------------

namespace {

// Inputs that are read together: more streams exceed the prefetchers and the registers.
constexpr std::size_t kGroup = 8;
// With more inputs, partial sums of this many elements stay in the L1 cache.
constexpr std::size_t kBlock = 2048;
// Elements that a thread claims at a time.
constexpr std::size_t kChunk = 65536;
// Below this traffic per thread, starting it does not pay.
constexpr std::size_t kBytesPerThread = std::size_t{1} << 20;

// State of one call, shared by its threads.
template <class T>
struct Task {
  T* out;
  const T* const* inputs;
  std::size_t num_inputs;
  bool streams;
};

}  // namespace

#define SHOAL_KERNELS "engine/reduce_kernels.inc"
#include "base/every_level.inc"

namespace {

template <class T>
using RangeSum = void (*)(const Task<T>&, std::size_t begin, std::size_t end);

template <class T>
RangeSum<T> range_sum_of(Level level) {
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return avx512::sum_range<T>;
    case Level::avx2: return avx2::sum_range<T>;
#endif
    default: return portable::sum_range<T>;
  }
}

template <class T>
void sum(void* out, const void* const* inputs, std::size_t num_inputs, std::size_t count, int num_threads,
         Level level) {
  std::vector<const T*> typed(num_inputs);
  bool in_place = false;
  for (std::size_t k = 0; k < num_inputs; ++k) {
    typed[k] = static_cast<const T*>(inputs[k]);
    in_place = in_place || inputs[k] == out;
  }
  const bool can_align = reinterpret_cast<std::uintptr_t>(out) % sizeof(T) == 0;
  // past the caches: 8 inputs of 25 MiB take 9 transfers instead of 10
  const bool streams = count * sizeof(T) >= kStreamedBytes && can_align && !in_place;
  const Task<T> task{static_cast<T*>(out), typed.data(), num_inputs, streams};
  const std::size_t traffic = count * sizeof(T) * (num_inputs + 1);
  const auto worthwhile = static_cast<int>(std::min<std::size_t>(1 + traffic / kBytesPerThread, 1024));
  const RangeSum<T> range_sum = range_sum_of<T>(level);
  Claims claims((count + kChunk - 1) / kChunk);
  run_on_threads(std::min(num_threads, worthwhile), [&] {
    for (std::size_t chunk; claims.next(chunk);) {
      range_sum(task, chunk * kChunk, std::min(count, (chunk + 1) * kChunk));
    }
  });
}

void check(const void* out, const void* const* inputs, std::size_t num_inputs, std::size_t num_bytes,
           int num_threads, Level level) {
  if (num_inputs == 0) throw std::invalid_argument("a sum needs at least one input");
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + " must be at least 1");
  }
  const std::vector<Level> levels = supported_levels();
  if (std::find(levels.begin(), levels.end(), level) == levels.end()) {
    throw std::invalid_argument("this processor cannot run the level '" + std::string(name_of(level)) + "'");
  }
  const auto first = reinterpret_cast<std::uintptr_t>(out);
  for (std::size_t k = 0; k < num_inputs; ++k) {
    const auto other = reinterpret_cast<std::uintptr_t>(inputs[k]);
    if (other != first && other < first + num_bytes && first < other + num_bytes) {
      throw std::invalid_argument("input " + std::to_string(k) +
                                  " overlaps the output partly; the output may only be one of the inputs");
    }
  }
}

}  // namespace

void sum_in_rank_order(void* out, const void* const* inputs, std::size_t num_inputs, std::size_t count,
                       Element element, int num_threads, Level level) {
  check(out, inputs, num_inputs, count * size_of(element), num_threads, level);
  switch (element) {
    case Element::float32: return sum<float>(out, inputs, num_inputs, count, num_threads, level);
    case Element::bfloat16: return sum<Bf16>(out, inputs, num_inputs, count, num_threads, level);
    case Element::float16: return sum<Fp16>(out, inputs, num_inputs, count, num_threads, level);
    default: throw std::invalid_argument("there are no kernels that sum " + std::string(name_of(element)));
  }
}

// ---- any reduction of any type --------------------------------------------------------------------------

namespace {

float to_float(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

float to_float(Fp16 x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1f, fraction = x.bits & 0x3ff;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float tiny = std::ldexp(static_cast<float>(fraction), -24);
  return sign ? -tiny : tiny;
}

template <class T>
float to_float(T x) {
  return static_cast<float>(x);
}

Bf16 to_bfloat16(float x) {
  if (std::isnan(x)) return {0x7fc0};
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

Fp16 to_float16(float x) {
  if (std::isnan(x)) return {0x7e00};
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
  const float size = std::fabs(x);
  if (size >= 65520.0f) return {static_cast<std::uint16_t>(sign | 0x7c00)};
  // Scaled so that one unit is one ulp of the result; nearbyint rounds to even, as the hardware does.
  const int exponent = size < 6.103515625e-05f ? -14 : std::ilogb(size);
  const auto steps = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  const std::uint32_t base = exponent == -14 && steps < 1024 ? 0 : static_cast<std::uint32_t>(exponent + 14) << 10;
  return {static_cast<std::uint16_t>(sign | (base + steps))};
}

template <class T>
T from_float(float x) {
  if constexpr (std::is_same_v<T, Bf16>) return to_bfloat16(x);
  else if constexpr (std::is_same_v<T, Fp16>) return to_float16(x);
  else return static_cast<T>(x);
}

template <class T>
constexpr bool is_half_v = std::is_same_v<T, Bf16> || std::is_same_v<T, Fp16>;

// Integers are added and multiplied unsigned, where overflow is defined.
template <class T, bool multiply>
T wrap(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    using Wide = std::conditional_t<(sizeof(U) < 4), std::uint32_t, U>;
    const Wide x = static_cast<U>(a), y = static_cast<U>(b);
    return static_cast<T>(static_cast<U>(multiply ? x * y : x + y));
  } else {
    return multiply ? a * b : a + b;
  }
}

template <class T>
T lesser(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return a;
  }
  return b < a || b != b ? b : a;
}

template <class T>
T greater(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return a;
  }
  return b > a || b != b ? b : a;
}

template <class T>
T apply(Combine combine, T a, T b) {
  switch (combine) {
    case Combine::sum:
    case Combine::avg: return wrap<T, false>(a, b);
    case Combine::prod: return wrap<T, true>(a, b);
    case Combine::min: return lesser(a, b);
    case Combine::max: return greater(a, b);
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (combine == Combine::band) return static_cast<T>(a & b);
    if (combine == Combine::bor) return static_cast<T>(a | b);
    return static_cast<T>(a ^ b);
  }
  return a;
}

// In blocks, so that the running result stays in the L1 cache.
template <class In, class Out = In>
void combine_typed(void* out, const std::vector<const void*>& inputs, std::size_t count, const CombineSpec& spec) {
  using Work = std::conditional_t<is_half_v<In>, float, In>;
  constexpr std::size_t kBlock = 1024;
  Work block[kBlock];
  In x[kBlock];  // copied: contributions may be unaligned
  Out rounded[kBlock];
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      std::memcpy(x, static_cast<const std::byte*>(inputs[k]) + begin * sizeof(In), size * sizeof(In));
      for (std::size_t i = 0; i < size; ++i) {
        Work value;
        if constexpr (is_half_v<In>) value = to_float(x[i]);
        else value = x[i];
        block[i] = k == 0 ? value : apply<Work>(spec.combine, block[i], value);
      }
    }
    for (std::size_t i = 0; i < size; ++i) {
      Work value = block[i];
      if constexpr (std::is_floating_point_v<Work>) {
        if (spec.combine == Combine::avg) value = value / static_cast<Work>(spec.divisor);
      }
      if constexpr (std::is_same_v<Work, Out>) rounded[i] = value;
      else rounded[i] = from_float<Out>(static_cast<float>(value));
    }
    std::memcpy(static_cast<std::byte*>(out) + begin * sizeof(Out), rounded, size * sizeof(Out));
  }
}

}  // namespace

void require_possible(const CombineSpec& spec) {
  const bool partial = (spec.input == Element::float32 && is_half(spec.result)) ||
                       (spec.result == Element::float32 && is_half(spec.input));
  if (spec.input != spec.result && !partial) {
    throw std::invalid_argument("contributions of " + std::string(name_of(spec.input)) + " do not make a result of " +
                                std::string(name_of(spec.result)));
  }
  if (spec.divisor < 1) throw std::invalid_argument("the divisor of an average is " + std::to_string(spec.divisor));
  const bool bits = spec.combine == Combine::band || spec.combine == Combine::bor || spec.combine == Combine::bxor;
  const bool integer = spec.result == Element::int8 || spec.result == Element::uint8 ||
                       spec.result == Element::int32 || spec.result == Element::int64;
  if (spec.combine == Combine::avg && integer) {
    throw std::invalid_argument("an average needs floating-point elements, not " + std::string(name_of(spec.result)) +
                                "; sum them and divide");
  }
  if (bits && !integer) {
    throw std::invalid_argument("the operation '" + std::string(name_of(spec.combine)) + "' needs integers, not " +
                                std::string(name_of(spec.result)));
  }
}

void combine_in_order(void* out, const std::vector<const void*>& inputs, std::size_t count,
                      const CombineSpec& spec) {
  require_possible(spec);
  if (spec.combine == Combine::sum && spec.input == spec.result && has_kernels(spec.result)) {
    return sum_in_rank_order(out, inputs.data(), inputs.size(), count, spec.result, 1);
  }
  if (spec.result == Element::float32 && spec.input == Element::bfloat16) {  // a partial sum
    return combine_typed<Bf16, float>(out, inputs, count, spec);
  }
  if (spec.result == Element::float32 && spec.input == Element::float16) {
    return combine_typed<Fp16, float>(out, inputs, count, spec);
  }
  if (spec.input != spec.result) {  // partial sums in fp32, result in 16 bits
    if (spec.result == Element::bfloat16) combine_typed<float, Bf16>(out, inputs, count, spec);
    else combine_typed<float, Fp16>(out, inputs, count, spec);
    return;
  }
  switch (spec.result) {
    case Element::float32: return combine_typed<float>(out, inputs, count, spec);
    case Element::float64: return combine_typed<double>(out, inputs, count, spec);
    case Element::float16: return combine_typed<Fp16>(out, inputs, count, spec);
    case Element::bfloat16: return combine_typed<Bf16>(out, inputs, count, spec);
    case Element::int8: return combine_typed<std::int8_t>(out, inputs, count, spec);
    case Element::uint8: return combine_typed<std::uint8_t>(out, inputs, count, spec);
    case Element::int32: return combine_typed<std::int32_t>(out, inputs, count, spec);
    case Element::int64: return combine_typed<std::int64_t>(out, inputs, count, spec);
  }
}

void widen(float* out, const void* input, std::size_t count, Element element) {
  combine_in_order(out, {input}, count, {Combine::sum, Element::float32, element, 1});
}

}  // namespace shoal

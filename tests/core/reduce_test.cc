#include "engine/reduce.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

namespace reduce_test {

using shoal::Combine;
using shoal::combine_in_order;
using shoal::Element;

const Combine kAll[] = {Combine::sum, Combine::avg,  Combine::prod, Combine::min,
                        Combine::max, Combine::band, Combine::bor,  Combine::bxor};

// ---- 16-bit floats by their definition, in double, where every step is exact ----------------------------

struct Format {
  Element element;
  int exponent_bits, fraction_bits;
};
constexpr Format kBrain{Element::bfloat16, 8, 7}, kHalf{Element::float16, 5, 10};

double decode(const Format& format, std::uint16_t code) {
  const int fraction = code & ((1 << format.fraction_bits) - 1);
  const int exponent = (code >> format.fraction_bits) & ((1 << format.exponent_bits) - 1);
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const double sign = code & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << format.exponent_bits) - 1) return fraction ? std::nan("") : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - format.fraction_bits);
  return sign * std::ldexp(fraction + (1 << format.fraction_bits), exponent - bias - format.fraction_bits);
}

std::uint16_t infinity_of(const Format& format) {
  return static_cast<std::uint16_t>(((1 << format.exponent_bits) - 1) << format.fraction_bits);
}

std::uint16_t quiet_nan_of(const Format& format) {
  return static_cast<std::uint16_t>(infinity_of(format) | (1 << (format.fraction_bits - 1)));
}

// To nearest, ties to even. Codes of one sign are in the order of their values, and the code after the largest
// finite one, infinity, rounds as if the next power of two stood there.
std::uint16_t encode(const Format& format, double x) {
  if (std::isnan(x)) return quiet_nan_of(format);
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double size = std::fabs(x);
  const std::uint16_t top = infinity_of(format);
  const auto value = [&](int code) {
    return code < top ? decode(format, static_cast<std::uint16_t>(code)) : std::ldexp(1.0, 1 << (format.exponent_bits - 1));
  };
  if (size >= value(top)) return sign | top;
  int low = 0, high = top;  // value(low) <= size < value(high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (value(middle) <= size ? low : high) = middle;
  }
  const double below = size - value(low), above = value(high) - size;
  const int code = below < above || (below == above && low % 2 == 0) ? low : high;
  return static_cast<std::uint16_t>(sign | code);
}

std::vector<std::uint16_t> rounded(const Format& format, const std::vector<float>& values) {
  std::vector<std::uint16_t> out(values.size());
  combine_in_order(out.data(), {values.data()}, values.size(), {Combine::sum, format.element, Element::float32, 1});
  return out;
}

// Every code, the middle to the next code, and the floats beside both.
TEST(reduce_rounds_to_16_bits_like_the_definition) {
  for (const Format& format : {kBrain, kHalf}) {
    std::vector<float> values;
    for (int code = 0; code < 0x10000; ++code) {
      const auto here = static_cast<float>(decode(format, static_cast<std::uint16_t>(code)));
      const bool last = (code & 0x7fff) >= infinity_of(format) - 1;
      const double next = last ? here : decode(format, static_cast<std::uint16_t>(code + 1));
      const auto middle = last ? here * 1.001f : static_cast<float>((static_cast<double>(here) + next) / 2);
      for (float x : {here, middle}) {
        for (float y : {std::nextafter(x, -INFINITY), x, std::nextafter(x, INFINITY)}) values.push_back(y);
      }
    }
    for (float x : {65519.996f, 65520.0f, 3.3961775e38f, 3.3895314e38f, std::numeric_limits<float>::max(), 1e-45f, -1e-45f}) values.push_back(x);
    const auto got = rounded(format, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (got[i] != encode(format, values[i])) CHECK_EQ(got[i], encode(format, values[i]));
    }
  }
}

TEST(reduce_widens_every_16_bit_code) {
  std::vector<std::uint16_t> codes(0x10000);
  for (std::size_t k = 0; k < codes.size(); ++k) codes[k] = static_cast<std::uint16_t>(k);
  for (const Format& format : {kBrain, kHalf}) {
    std::vector<float> out(codes.size()), partial(codes.size());
    shoal::widen(out.data(), codes.data(), codes.size(), format.element);
    combine_in_order(partial.data(), {codes.data()}, codes.size(), {Combine::sum, Element::float32, format.element, 1});
    for (std::size_t k = 0; k < codes.size(); ++k) {
      const double exact = decode(format, codes[k]);
      CHECK(std::isnan(exact) ? std::isnan(out[k]) && std::isnan(partial[k])
                              : out[k] == exact && partial[k] == exact && std::signbit(out[k]) == std::signbit(exact));
    }
  }
}

// ---- every type and operation against plain loops -------------------------------------------------------

// One step of the formula, in the type in which it is defined: fp32 for 16-bit floats.
template <class T>
T step(Combine combine, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (combine == Combine::prod) return a * b;
    if (combine == Combine::min || combine == Combine::max) {
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      return (combine == Combine::min) == (b < a) ? b : a;
    }
    return a + b;
  } else {
    const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);  // exact modulo 2^64
    switch (combine) {
      case Combine::prod: return static_cast<T>(x * y);
      case Combine::min: return std::min(a, b);
      case Combine::max: return std::max(a, b);
      case Combine::band: return static_cast<T>(x & y);
      case Combine::bor: return static_cast<T>(x | y);
      case Combine::bxor: return static_cast<T>(x ^ y);
      default: return static_cast<T>(x + y);
    }
  }
}

template <class T>
bool alike(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  }
  return a == b;
}

template <class T>
T any_value(std::mt19937_64& random) {
  if constexpr (std::is_floating_point_v<T>) {
    static const T special[] = {0, -T(0), 1, -1, std::numeric_limits<T>::infinity(), -std::numeric_limits<T>::infinity(),
                                std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::max(), std::numeric_limits<T>::denorm_min()};
    if (random() % 16 == 0) return special[random() % 9];
    return std::ldexp(static_cast<T>(static_cast<std::int64_t>(random())), static_cast<int>(random() % 40) - 80);
  } else {
    return static_cast<T>(random());
  }
}

template <class T>
void against_loops(Element element) {
  std::mt19937_64 random(static_cast<std::uint64_t>(element));
  for (std::size_t n : {1, 2, 3, 5}) {
    for (std::size_t count : {0, 1, 1023, 1024, 1025, 2500}) {
      std::vector<std::vector<T>> inputs(n, std::vector<T>(count));
      std::vector<const void*> pointers;
      for (auto& input : inputs) {
        for (T& x : input) x = any_value<T>(random);
        pointers.push_back(input.data());
      }
      for (Combine combine : kAll) {
        const bool bits = combine == Combine::band || combine == Combine::bor || combine == Combine::bxor;
        std::vector<T> out(count);
        const shoal::CombineSpec spec{combine, element, element, 3};
        if (std::is_floating_point_v<T> ? bits : combine == Combine::avg) {
          CHECK_THROWS(std::invalid_argument, combine_in_order(out.data(), pointers, count, spec));
          continue;
        }
        combine_in_order(out.data(), pointers, count, spec);
        bool right = true;
        for (std::size_t i = 0; i < count; ++i) {
          T value = inputs[0][i];
          for (std::size_t k = 1; k < n; ++k) value = step(combine, value, inputs[k][i]);
          if (combine == Combine::avg) value = static_cast<T>(value / 3);
          right = right && alike(out[i], value);
        }
        if (!right) check::fail(__FILE__, __LINE__, std::string(name_of(element)) + " " + std::string(name_of(combine)) + " of " + std::to_string(n));
      }
    }
  }
}

TEST(reduce_every_type_and_operation_against_plain_loops) {
  against_loops<float>(Element::float32);
  against_loops<double>(Element::float64);
  against_loops<std::int8_t>(Element::int8);
  against_loops<std::uint8_t>(Element::uint8);
  against_loops<std::int32_t>(Element::int32);
  against_loops<std::int64_t>(Element::int64);
}

// 16-bit contributions, or fp32 partial sums of them: combined in fp32, rounded once.
TEST(reduce_16_bit_floats_round_once) {
  std::mt19937_64 random(5);
  constexpr std::size_t kCount = 4100;
  for (const Format& format : {kBrain, kHalf}) {
    for (std::size_t n : {1, 2, 5}) {
      std::vector<std::vector<std::uint16_t>> codes(n, std::vector<std::uint16_t>(kCount));
      std::vector<std::vector<float>> wide(n, std::vector<float>(kCount));
      std::vector<const void*> narrow_at, wide_at;
      for (std::size_t k = 0; k < n; ++k) {
        for (std::size_t i = 0; i < kCount; ++i) {
          codes[k][i] = static_cast<std::uint16_t>(random());
          wide[k][i] = static_cast<float>(decode(format, codes[k][i]));
        }
        narrow_at.push_back(codes[k].data());
        wide_at.push_back(wide[k].data());
      }
      for (Combine combine : {Combine::sum, Combine::avg, Combine::prod, Combine::min, Combine::max}) {
        std::vector<std::uint16_t> narrow(kCount), from_wide(kCount);
        std::vector<float> partial(kCount);
        combine_in_order(narrow.data(), narrow_at, kCount, {combine, format.element, format.element, 7});
        combine_in_order(from_wide.data(), wide_at, kCount, {combine, format.element, Element::float32, 7});
        combine_in_order(partial.data(), narrow_at, kCount, {combine, Element::float32, format.element, 7});
        bool right = true;
        for (std::size_t i = 0; i < kCount; ++i) {
          float value = wide[0][i];
          for (std::size_t k = 1; k < n; ++k) value = step(combine, value, wide[k][i]);
          if (combine == Combine::avg) value = value / 7.0f;
          const std::uint16_t expected = encode(format, value);
          // Which of -0 and +0 is the lesser is left open.
          const auto same = [&](std::uint16_t got) { return got == expected || (value == 0.0f && (got & 0x7fff) == 0); };
          right = right && same(narrow[i]) && same(from_wide[i]) && alike(partial[i], value);
        }
        if (!right) check::fail(__FILE__, __LINE__, std::string(name_of(format.element)) + " " + std::string(name_of(combine)));
      }
    }
  }
}

TEST(reduce_at_any_address_and_in_place) {
  std::mt19937_64 random(6);
  constexpr std::size_t kCount = 3000;
  for (Element element : {Element::float32, Element::float64, Element::float16, Element::bfloat16, Element::int32, Element::int64}) {
    for (Combine combine : {Combine::sum, Combine::max}) {
      const std::size_t bytes = kCount * size_of(element);
      std::vector<std::vector<std::uint8_t>> aligned(3, std::vector<std::uint8_t>(bytes));
      std::vector<std::vector<std::uint8_t>> odd(3, std::vector<std::uint8_t>(bytes + 3));
      std::vector<const void*> aligned_at, odd_at;
      for (std::size_t k = 0; k < 3; ++k) {
        for (auto& byte : aligned[k]) byte = static_cast<std::uint8_t>(random() % 64);  // no NaN, no infinity
        std::memcpy(odd[k].data() + k + 1, aligned[k].data(), bytes);
        aligned_at.push_back(aligned[k].data());
        odd_at.push_back(odd[k].data() + k + 1);
      }
      std::vector<std::uint8_t> expected(bytes), odd_out(bytes + 1);
      const shoal::CombineSpec spec{combine, element, element, 1};
      combine_in_order(expected.data(), aligned_at, kCount, spec);
      combine_in_order(odd_out.data() + 1, odd_at, kCount, spec);
      CHECK(std::memcmp(odd_out.data() + 1, expected.data(), bytes) == 0);
      combine_in_order(aligned[1].data(), aligned_at, kCount, spec);
      CHECK(aligned[1] == expected);
    }
  }
}

TEST(reduce_refuses_types_that_do_not_go_together) {
  std::vector<double> x(10), out(10);
  for (int result = 0; result < 8; ++result) {
    for (int input = 0; input < 8; ++input) {
      const shoal::CombineSpec spec{Combine::sum, static_cast<Element>(result), static_cast<Element>(input), 1};
      const auto half = [](Element element) { return element == Element::float16 || element == Element::bfloat16; };
      const bool possible = result == input || (half(spec.result) && spec.input == Element::float32) ||
                            (half(spec.input) && spec.result == Element::float32);
      if (possible) combine_in_order(out.data(), {x.data()}, 10, spec);
      else CHECK_THROWS(std::invalid_argument, combine_in_order(out.data(), {x.data()}, 10, spec));
    }
  }
}

}  // namespace reduce_test

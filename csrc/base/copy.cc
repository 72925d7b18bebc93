#include "base/copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace shoal {

#if defined(__x86_64__)

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  if (bytes < 2 * kLine) {
    if (bytes) std::memcpy(to, from, bytes);
    return;
  }
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* read = reinterpret_cast<const __m128i*>(from + at);
    auto* written = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1);
    const __m128i c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
    _mm_stream_si128(written, a);
    _mm_stream_si128(written + 1, b);
    _mm_stream_si128(written + 2, c);
    _mm_stream_si128(written + 3, d);
  }
  std::memcpy(to + at, from + at, bytes - at);
  _mm_sfence();  // streaming stores are not ordered before a later release
}

#else

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

#endif

}  // namespace shoal

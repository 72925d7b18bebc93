// Copies of large results that nobody reads soon.
#pragma once

#include <cstddef>

namespace shoal {

// From this size on, a result is written past the caches: it would evict what is still to be read, and each line would
// be fetched before it is overwritten.
inline constexpr std::size_t kStreamedBytes = std::size_t{4} << 20;

// Copies to memory past the caches, where the processor can. The regions must not overlap.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes);

}  // namespace shoal

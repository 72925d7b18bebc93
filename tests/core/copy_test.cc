#include "base/copy.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "check.h"

namespace copy_test {

// Every alignment of both sides, sizes around a cache line and a large one; nothing beside the region changes.
TEST(copy_streaming_copies_every_byte_and_no_other) {
  std::vector<std::byte> from(70'000);
  for (std::size_t k = 0; k < from.size(); ++k) from[k] = static_cast<std::byte>(k * 31 + k / 256);
  for (const std::size_t bytes : {0, 1, 63, 64, 127, 128, 129, 191, 192, 193, 1000, 65'536}) {
    for (std::size_t shift = 0; shift < 64; shift += bytes > 1000 ? 21 : 1) {
      std::vector<std::byte> to(bytes + 200, std::byte{0xee}), wanted = to;
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(shift % 7), bytes, wanted.begin() + static_cast<std::ptrdiff_t>(shift));
      shoal::copy_streaming(to.data() + shift, from.data() + shift % 7, bytes);
      CHECK(to == wanted);
    }
  }
}

}  // namespace copy_test

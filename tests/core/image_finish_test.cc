// The pass over an image's pixels stays inside its buffers, for every level, type, layout and odd width. (Its
// values are compared with torchvision's in tests/unit/data/images.)
#include "image/finish.h"

#include <cstdint>
#include <vector>

#include "check.h"

namespace image_finish_test {

using shoal::Adjustment;
using shoal::FinishedType;

const std::vector<shoal::ColourStep> kSteps{{Adjustment::hue, -0.3f}, {Adjustment::brightness, 1.2f},
                                            {Adjustment::contrast, 0.8f}, {Adjustment::saturation, 1.3f}};

// Exactly as large as the pass needs them: the address sanitizer sees one byte too far.
template <class T>
std::vector<T> finished(std::size_t height, std::size_t width, FinishedType type, bool channels_last, bool flip,
                        shoal::Level level) {
  std::vector<std::uint8_t> pixels(height * width * 3);
  for (std::size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<std::uint8_t>(i * 2654435761u >> 11);
  std::vector<T> out(pixels.size());
  const auto rows = static_cast<std::ptrdiff_t>(height), columns = static_cast<std::ptrdiff_t>(width);
  const shoal::Finished to{out.data(), type, channels_last ? 1 : rows * columns, channels_last ? 3 * columns : columns,
                           channels_last ? 3 : 1};
  shoal::finish_image({pixels.data(), height, width, 3 * columns}, to, kSteps,
                      {flip, {0.5f, 1.0f, 2.0f}, {1.0f, 2.0f, 3.0f}}, level);
  return out;
}

template <class T>
void compare_levels(FinishedType type) {
  for (const std::size_t width : {1u, 15u, 16u, 17u, 255u, 256u, 257u, 513u}) {
    for (const bool channels_last : {false, true}) {
      for (const bool flip : {false, true}) {
        const std::vector<T> expected = finished<T>(3, width, type, channels_last, flip, shoal::Level::portable);
        for (const shoal::Level level : shoal::supported_levels()) {
          CHECK(finished<T>(3, width, type, channels_last, flip, level) == expected);
        }
      }
    }
  }
}

TEST(image_finish_levels_agree_within_their_buffers) {
  compare_levels<float>(FinishedType::float32);
  compare_levels<std::uint16_t>(FinishedType::bfloat16);
  compare_levels<std::uint8_t>(FinishedType::uint8);
}

TEST(image_finish_of_no_pixels_does_nothing) {
  CHECK(finished<float>(0, 5, FinishedType::float32, false, false, shoal::best_level()).empty());
}

}  // namespace image_finish_test

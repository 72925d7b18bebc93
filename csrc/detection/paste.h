// Pastes masks of a fixed size, such as 28 x 28, into their images at their boxes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu.h"

namespace shoal {

struct PasteInput {
  const float* masks;          // [num_masks][size][size], probabilities
  const float* boxes;          // [num_masks][4], x1, y1, x2, y2 in pixels of the image
  const std::int64_t* images;  // [num_masks][3]: offset of the mask's bitmap in the output, height, width
  std::size_t num_masks;
  std::size_t size;
};

// Writes 1 where the probability, interpolated bilinearly in the box, exceeds the threshold. The output must be all
// zeros: only pixels in boxes are written.
void paste_masks(const PasteInput& input, float threshold, std::uint8_t* bitmaps, int num_threads,
                 Level level = best_level());

}  // namespace shoal

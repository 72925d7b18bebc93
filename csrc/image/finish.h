// The last step of an image on its way into a model: mirror image, colours, normalisation, in one pass over
// its pixels. The formulas are those of src/shoal/data/images/pixels.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cpu.h"

namespace shoal {

enum class Adjustment { brightness, contrast, saturation, hue };

// One adjustment of the colours, with torchvision's factor (hue: the shift, a part of the colour circle).
struct ColourStep {
  Adjustment kind;
  float factor;
};

// Red, green and blue of a pixel next to each other, and the pixels of a row.
struct PixelRows {
  const std::uint8_t* first;
  std::size_t height;
  std::size_t width;
  std::ptrdiff_t row_bytes;  // from one row to the next; a crop's is its image's
};

enum class FinishedType { float32, bfloat16, uint8 };

// Strides are in elements. Either columns follow each other (planes of channels), or channels do and columns
// are three apart (channels last).
struct Finished {
  void* first;
  FinishedType type;
  std::ptrdiff_t channel;
  std::ptrdiff_t row;
  std::ptrdiff_t column;
};

struct FinishOptions {
  bool flip;
  float scale[3];  // of red, green, blue from 0 to 255, after the adjustments
  float shift[3];
};

// finished = scale * adjusted(mirrored(pixels)) + shift. Each adjustment is clamped to [0, 255] and nothing is
// rounded before the end. All fp32, in an order that does not depend on the level: neither do the bits.
void finish_image(const PixelRows& pixels, const Finished& finished, std::span<const ColourStep> steps,
                  const FinishOptions& options, Level level = best_level());

}  // namespace shoal

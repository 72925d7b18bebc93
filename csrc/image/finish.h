// The last step of image preprocessing: horizontal flip, colour adjustments and normalization, in one pass over the
// pixels. The formulas are in src/shoal/data/images/pixels.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cpu.h"

namespace shoal {

enum class Adjustment { brightness, contrast, saturation, hue };

// A colour adjustment, with torchvision's factor (for hue: the shift, as a fraction of the colour circle).
struct ColourStep {
  Adjustment kind;
  float factor;
};

// Interleaved RGB pixels, row by row.
struct PixelRows {
  const std::uint8_t* first;
  std::size_t height;
  std::size_t width;
  std::ptrdiff_t row_bytes;  // from one row to the next; of a crop, that of its image
};

enum class FinishedType { float32, bfloat16, uint8 };

// Strides are in elements. Either columns are adjacent (planes of channels), or channels are and columns are three
// apart (channels last).
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

// finished = scale * adjusted(flipped(pixels)) + shift. Each adjustment is clamped to [0, 255], and nothing is
// rounded before the end. All fp32, in an order that does not depend on the level, so the bits do not either.
void finish_image(const PixelRows& pixels, const Finished& finished, std::span<const ColourStep> steps,
                  const FinishOptions& options, Level level = best_level());

}  // namespace shoal

#include "detection/paste.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "detection/levels.h"

namespace shoal {
namespace {

// Sampling positions of the pixels begin .. end of an image in a row of `size` samples that is stretched over
// `length` pixels from `from` on: the two neighbouring samples, and the weight of the second.
struct Axis {
  std::int64_t begin = 0, end = 0;
  std::vector<std::int32_t> low, high;
  std::vector<float> near_low, near_high;

  void set(std::int64_t from, std::int64_t length, std::int64_t image_length, std::int32_t size) {
    begin = std::clamp<std::int64_t>(from, 0, image_length);
    end = std::clamp<std::int64_t>(from + length, begin, image_length);
    const std::size_t count = static_cast<std::size_t>(end - begin);
    low.resize(count), high.resize(count), near_low.resize(count), near_high.resize(count);
    const float scale = static_cast<float>(size) / static_cast<float>(length);
    for (std::size_t n = 0; n < count; ++n) {
      const float pixel = static_cast<float>(begin - from + static_cast<std::int64_t>(n));
      const float at = std::max(scale * (pixel + 0.5f) - 0.5f, 0.0f);
      low[n] = std::min(static_cast<std::int32_t>(at), size - 1);
      high[n] = std::min(low[n] + 1, size - 1);
      near_high[n] = std::clamp(at - static_cast<float>(low[n]), 0.0f, 1.0f);
      near_low[n] = 1.0f - near_high[n];
    }
  }
};

struct Span {
  std::int64_t from, length;
};

// The pixel range of a side of a box that is widened about its centre, truncated toward zero.
Span widened(float low, float high, float scale) {
  const float half = (high - low) * 0.5f * scale, middle = (high + low) * 0.5f;
  const std::int64_t first = static_cast<std::int64_t>(middle - half);
  const std::int64_t last = static_cast<std::int64_t>(middle + half);
  return {first, std::max<std::int64_t>(last - first + 1, 1)};
}

class Paster {
 public:
  Paster(const PasteInput& input, float threshold, std::uint8_t* bitmaps, Level level)
      : input_(input), threshold_(threshold), bitmaps_(bitmaps), level_(level), padded_(input.size + 2) {}

  void paste(std::size_t number) {
    const float* box = input_.boxes + 4 * number;
    const std::int64_t* image = input_.images + 3 * number;
    // one row of zeros around the mask, so that it fades out at the border of the widened box
    const float scale = static_cast<float>(static_cast<double>(padded_) / static_cast<double>(input_.size));
    const Span x = widened(box[0], box[2], scale), y = widened(box[1], box[3], scale);
    columns_.set(x.from, x.length, image[2], static_cast<std::int32_t>(padded_));
    rows_.set(y.from, y.length, image[1], static_cast<std::int32_t>(padded_));
    const std::size_t width = columns_.low.size();
    if (width == 0 || rows_.low.empty()) return;
    stretch(input_.masks + number * input_.size * input_.size, width);
    for (std::size_t n = 0; n < rows_.low.size(); ++n) {
      std::uint8_t* out = bitmaps_ + image[0] + (rows_.begin + static_cast<std::int64_t>(n)) * image[2] + columns_.begin;
      const float* upper = lines_.data() + static_cast<std::size_t>(rows_.low[n]) * width;
      const float* lower = lines_.data() + static_cast<std::size_t>(rows_.high[n]) * width;
      const float near_upper = rows_.near_low[n], near_lower = rows_.near_high[n], threshold = threshold_;
      run_at(level_, [&]() __attribute__((always_inline)) {
        std::uint8_t* __restrict pixels = out;
        const float *first = upper, *second = lower;
        const float near_first = near_upper, near_second = near_lower, least = threshold;
        for (std::size_t k = 0, count = width; k < count; ++k) {
          pixels[k] = first[k] * near_first + second[k] * near_second > least ? 1 : 0;
        }
      });
    }
  }

 private:
  // Each row of the padded mask, interpolated along x: [padded][width].
  void stretch(const float* mask, std::size_t width) {
    lines_.assign(padded_ * width, 0.0f);
    source_.assign(padded_, 0.0f);
    for (std::size_t row = 0; row < input_.size; ++row) {
      std::copy_n(mask + row * input_.size, input_.size, source_.data() + 1);
      float* line = lines_.data() + (row + 1) * width;
      for (std::size_t k = 0; k < width; ++k) {
        line[k] = source_[columns_.low[k]] * columns_.near_low[k] + source_[columns_.high[k]] * columns_.near_high[k];
      }
    }
  }

  const PasteInput& input_;
  float threshold_;
  std::uint8_t* bitmaps_;
  Level level_;
  std::size_t padded_;
  Axis columns_, rows_;
  std::vector<float> lines_, source_;
};

}  // namespace

void paste_masks(const PasteInput& input, float threshold, std::uint8_t* bitmaps, int num_threads, Level level) {
  Claims claims(input.num_masks);
  run_on_threads(num_threads, [&] {
    Paster paster(input, threshold, bitmaps, level);
    for (std::size_t number; claims.next(number);) paster.paste(number);
  });
}

}  // namespace shoal

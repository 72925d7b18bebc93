#include "image/finish.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>
#include <vector>

namespace shoal {
namespace {

// Pixels per tile: three arrays of floats fit the L1 cache. A multiple of the lanes of a sum.
constexpr std::size_t kTile = 256;
constexpr std::size_t kLanes = 16;
constexpr float kGrey[3] = {0.2989f, 0.587f, 0.114f};  // ITU-R BT.601, as torchvision

struct Tile {
  alignas(64) float red[kTile];
  alignas(64) float green[kTile];
  alignas(64) float blue[kTile];
};

// A prepared step; for contrast, with the mean of the grey image after the preceding steps.
struct ReadyStep {
  Adjustment kind;
  float factor;
  float rest;       // 1 - factor
  float mean = 0;
};

struct Brain {  // the bits of a bfloat16
  std::uint16_t bits;
};

}  // namespace

#define SHOAL_KERNELS "image/finish_kernels.inc"
#include "base/every_level.inc"

namespace {

struct Kernels {
  double (*grey_sum)(const PixelRows&, std::span<const ReadyStep>);
  void (*finish)(const PixelRows&, const Finished&, std::span<const ReadyStep>, const FinishOptions&);
};

Kernels kernels_of(Level level) {
  const std::vector<Level> levels = supported_levels();
  if (std::find(levels.begin(), levels.end(), level) == levels.end()) {
    throw std::invalid_argument("this processor cannot run the level '" + std::string(name_of(level)) + "'");
  }
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return {avx512::grey_sum, avx512::finish};
    case Level::avx2: return {avx2::grey_sum, avx2::finish};
#endif
    default: return {portable::grey_sum, portable::finish};
  }
}

}  // namespace

void finish_image(const PixelRows& pixels, const Finished& finished, std::span<const ColourStep> steps,
                  const FinishOptions& options, Level level) {
  const Kernels kernels = kernels_of(level);
  const double num_pixels = static_cast<double>(pixels.height) * static_cast<double>(pixels.width);
  std::vector<ReadyStep> ready;
  for (const ColourStep& step : steps) {
    ReadyStep next{step.kind, step.factor, 1.0f - step.factor};
    // The preceding steps run again in the next pass, which is cheaper than storing their results.
    if (step.kind == Adjustment::contrast && num_pixels > 0) {
      next.mean = static_cast<float>(kernels.grey_sum(pixels, ready) / num_pixels);
    }
    ready.push_back(next);
  }
  kernels.finish(pixels, finished, ready, options);
}

}  // namespace shoal

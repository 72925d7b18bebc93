// Matches each anchor to an object of its image. Overlaps are used as they are computed and never stored: the matrix
// of 270,000 anchors and 20 objects would have 21 MB per image.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu.h"

namespace shoal {

struct MatchInput {
  const float* objects;        // [num_images][max_objects][4]
  const std::int64_t* counts;  // [num_images], number of objects
  const float* anchors;        // [num_images][num_anchors][4], or one set for all images
  bool anchors_shared;
  std::size_t num_images;
  std::size_t max_objects;
  std::size_t num_anchors;
};

struct MatchOptions {
  float high;
  float low;
  bool allow_low_quality;
};

inline constexpr std::int64_t kBelowLow = -1, kBetween = -2;

// matches [num_images][num_anchors]: the object with the highest IoU (the first of equals) if that is at least
// `high`, kBetween if it is at least `low`, else kBelowLow. With allow_low_quality, an anchor at which an object has
// its highest IoU of all anchors gets the object that overlaps most with the anchor.
void match_boxes(const MatchInput& input, const MatchOptions& options, std::int64_t* matches, int num_threads,
                 Level level = best_level());

}  // namespace shoal

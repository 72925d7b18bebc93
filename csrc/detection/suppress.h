// Greedy non-maximum suppression of many groups (images, pyramid levels) and classes in one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu.h"

namespace shoal {

struct SuppressInput {
  const float* boxes;           // [num_groups][size][4]
  const float* scores;          // [num_groups][size]; -infinity for padding
  const std::int64_t* classes;  // [num_groups][size], or null for a single class
  std::size_t num_groups;
  std::size_t size;
};

// keep [num_groups][size]: 0 for a box that a kept box of the same group and class with a higher score (or an equal
// score and a lower index) overlaps by more than the threshold, and for padding; else 1.
void suppress_boxes(const SuppressInput& input, double iou_threshold, std::uint8_t* keep, int num_threads,
                    Level level = best_level());

}  // namespace shoal

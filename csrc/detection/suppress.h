// Greedy non-maximum suppression of many groups (images, levels of a pyramid) and classes in one call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu.h"

namespace shoal {

struct SuppressInput {
  const float* boxes;           // [num_groups][size][4]
  const float* scores;          // [num_groups][size]; -infinity where there is no box
  const std::int64_t* classes;  // [num_groups][size], or null: all of one class
  std::size_t num_groups;
  std::size_t size;
};

// keep [num_groups][size]: 1 where no box of the same group and class with a higher score (or an equal one
// and a lower place) that is kept itself overlaps by more than the threshold, else 0.
void suppress_boxes(const SuppressInput& input, double iou_threshold, std::uint8_t* keep, int num_threads,
                    Level level = best_level());

}  // namespace shoal

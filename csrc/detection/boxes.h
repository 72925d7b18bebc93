// Boxes x1, y1, x2, y2 as a structure of arrays, for vectorized loops.
#pragma once

#include <algorithm>
#include <cstddef>

namespace shoal {

inline float area_of(const float* box) { return (box[2] - box[0]) * (box[3] - box[1]); }

// A pack of boxes by coordinate. Lanes from `count` on hold a box that overlaps nothing.
template <std::size_t kLanes>
struct BoxLanes {
  alignas(64) float x1[kLanes], y1[kLanes], x2[kLanes], y2[kLanes], area[kLanes];

  void set(std::size_t lane, const float* box) {
    x1[lane] = box[0], y1[lane] = box[1], x2[lane] = box[2], y2[lane] = box[3], area[lane] = area_of(box);
  }
  void clear_from(std::size_t count) {
    constexpr float kFar = 1e30f;
    for (std::size_t lane = count; lane < kLanes; ++lane) {
      x1[lane] = y1[lane] = kFar, x2[lane] = y2[lane] = -kFar, area[lane] = 1.0f;
    }
  }
  // Intersection over union with one box: inter / (area + area_of(box) - inter), with the operations and their order
  // of torchvision's box_iou and nms.
  [[gnu::always_inline]] float iou(std::size_t lane, const float* box, float box_area) const {
    const float left = x1[lane] > box[0] ? x1[lane] : box[0], right = x2[lane] < box[2] ? x2[lane] : box[2];
    const float top = y1[lane] > box[1] ? y1[lane] : box[1], bottom = y2[lane] < box[3] ? y2[lane] : box[3];
    const float width = right - left, height = bottom - top;
    const float inter = (width > 0.0f ? width : 0.0f) * (height > 0.0f ? height : 0.0f);
    return inter / (box_area + area[lane] - inter);
  }
};

}  // namespace shoal

#include "detection/suppress.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "detection/boxes.h"
#include "detection/levels.h"

namespace shoal {
namespace {

constexpr std::size_t kLanes = 32, kFewBoxes = 8192;

// The kept boxes, in packs. A new box is compared with them, instead of every kept box with all later ones: the
// comparison of a suppressed box ends at the first pack that suppresses it.
class Kept {
 public:
  explicit Kept(Level level) : level_(level) {}

  void clear() { count_ = 0; }

  void add(const float* box) {
    if (count_ % kLanes == 0) {
      if (packs_.size() == count_ / kLanes) packs_.emplace_back();
      packs_[count_ / kLanes].clear_from(0);
    }
    packs_[count_ / kLanes].set(count_ % kLanes, box);
    ++count_;
  }

  bool any_over(const float* box, float threshold) const {
    const std::size_t num_packs = (count_ + kLanes - 1) / kLanes;
    bool found = false;
    run_at(level_, [&]() __attribute__((always_inline)) {
      const float area = area_of(box);
      for (std::size_t pack = 0; pack < num_packs && !found; ++pack) {
        const BoxLanes<kLanes>& boxes = packs_[pack];
        std::int32_t over = 0;
        for (std::size_t k = 0; k < kLanes; ++k) over |= boxes.iou(k, box, area) > threshold;
        found = over != 0;
      }
    });
    return found;
  }

 private:
  Level level_;
  std::vector<BoxLanes<kLanes>> packs_;
  std::size_t count_ = 0;
};

// Returns the largest float that is not above the threshold: a float exceeds one exactly if it exceeds the other.
float as_float(double threshold) {
  float nearest = static_cast<float>(threshold);
  if (static_cast<double>(nearest) > threshold) {
    nearest = std::nextafter(nearest, -std::numeric_limits<float>::infinity());
  }
  return nearest;
}

struct Candidate {
  std::int64_t label;
  float score;
  std::uint32_t place;

  bool operator<(const Candidate& other) const {
    if (label != other.label) return label < other.label;
    if (score != other.score) return score > other.score;
    return place < other.place;
  }
};

void suppress_group(const SuppressInput& input, std::size_t group, float threshold, std::uint8_t* keep,
                    std::vector<Candidate>& candidates, Kept& kept) {
  const std::size_t first = group * input.size;
  candidates.clear();
  for (std::size_t n = 0; n < input.size; ++n) {
    const float score = input.scores[first + n];
    if (!(score > -std::numeric_limits<float>::infinity())) continue;
    const std::int64_t label = input.classes != nullptr ? input.classes[first + n] : 0;
    candidates.push_back({label, score, static_cast<std::uint32_t>(n)});
  }
  std::sort(candidates.begin(), candidates.end());
  std::fill_n(keep + first, input.size, std::uint8_t{0});
  for (std::size_t n = 0; n < candidates.size(); ++n) {
    if (n == 0 || candidates[n].label != candidates[n - 1].label) kept.clear();
    const float* box = input.boxes + 4 * (first + candidates[n].place);
    if (kept.any_over(box, threshold)) continue;
    kept.add(box);
    keep[first + candidates[n].place] = 1;
  }
}

}  // namespace

void suppress_boxes(const SuppressInput& input, double iou_threshold, std::uint8_t* keep, int num_threads,
                    Level level) {
  const float threshold = as_float(iou_threshold);
  Claims claims(input.num_groups);
  // starting a thread takes as long as a thousand boxes, or several thousand of many classes
  const bool few = input.num_groups * input.size < kFewBoxes;
  run_on_threads(few ? 1 : num_threads, [&] {
    std::vector<Candidate> candidates;
    Kept kept(level);
    for (std::size_t group; claims.next(group);) {
      suppress_group(input, group, threshold, keep, candidates, kept);
    }
  });
}

}  // namespace shoal

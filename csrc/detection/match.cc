#include "detection/match.h"

#include <algorithm>
#include <vector>

#include "base/parallel.h"
#include "detection/boxes.h"
#include "detection/levels.h"

namespace shoal {
namespace {

constexpr std::size_t kBlock = 256;  // anchors, whose columns and best overlaps fit the L1 cache

class Matching {
 public:
  Matching(const MatchInput& input, const MatchOptions& options, std::int64_t* matches, Level level)
      : input_(input),
        options_(options),
        matches_(matches),
        level_(level),
        blocks_((input.num_anchors + kBlock - 1) / kBlock),
        best_(input.num_images * input.num_anchors),
        highest_(input.num_images * blocks_ * input.max_objects) {}

  std::size_t num_tasks() const { return input_.num_images * blocks_; }

  // Pass 1: the best object of each anchor of a block, and the highest overlap of each object in the block.
  void find_best(std::size_t task) {
    const Block block = block_of(task);
    BoxLanes<kBlock> anchors;
    load(block, anchors);
    alignas(64) float best[kBlock];
    alignas(64) std::int32_t which[kBlock];
    std::fill_n(best, kBlock, -1.0f);
    std::fill_n(which, kBlock, 0);
    float* highest = highest_.data() + task * input_.max_objects;
    for (std::int64_t object = 0; object < input_.counts[block.image]; ++object) {
      const float* box = object_box(block.image, object);
      highest[object] = compare(anchors, box, static_cast<std::int32_t>(object), best, which);
    }
    std::copy_n(best, block.count, best_.data() + block.at);
    std::copy_n(which, block.count, matches_ + block.at);
  }

  // Between the passes: the highest overlap of each object over all anchors, stored in its image's first block.
  void combine() {
    for (std::size_t image = 0; image < input_.num_images; ++image) {
      float* total = highest_.data() + image * blocks_ * input_.max_objects;
      for (std::size_t block = 1; block < blocks_; ++block) {
        for (std::int64_t object = 0; object < input_.counts[image]; ++object) {
          total[object] = std::max(total[object], total[block * input_.max_objects + object]);
        }
      }
    }
  }

  // Pass 2: thresholds, and anchors that are the best of some object.
  void decide(std::size_t task) {
    const Block block = block_of(task);
    const float* best = best_.data() + block.at;
    std::int64_t* matches = matches_ + block.at;
    alignas(64) std::int32_t chosen[kBlock] = {};
    const std::int64_t count = input_.counts[block.image];
    if (options_.allow_low_quality && count > 0) find_chosen(block, best, chosen);
    for (std::size_t n = 0; n < block.count; ++n) {
      if (chosen[n] != 0) continue;
      if (count == 0 || best[n] < options_.low) {
        matches[n] = kBelowLow;
      } else if (best[n] < options_.high) {
        matches[n] = kBetween;
      }
    }
  }

 private:
  struct Block {
    std::size_t image, begin, count, at;  // at: index of its first anchor in the outputs
  };

  Block block_of(std::size_t task) const {
    const std::size_t image = task / blocks_, begin = task % blocks_ * kBlock;
    const std::size_t count = std::min(kBlock, input_.num_anchors - begin);
    return {image, begin, count, image * input_.num_anchors + begin};
  }

  void load(const Block& block, BoxLanes<kBlock>& lanes) const {
    const float* first = input_.anchors + 4 * (input_.anchors_shared ? block.begin : block.at);
    for (std::size_t n = 0; n < block.count; ++n) lanes.set(n, first + 4 * n);
    lanes.clear_from(block.count);
  }

  const float* object_box(std::size_t image, std::int64_t object) const {
    return input_.objects + 4 * (image * input_.max_objects + static_cast<std::size_t>(object));
  }

  // Updates best and which with one object; returns its highest overlap in the block.
  float compare(const BoxLanes<kBlock>& anchors, const float* box, std::int32_t object, float* best,
                std::int32_t* which) const {
    alignas(64) float overlaps[kBlock];
    run_at(level_, [&]() __attribute__((always_inline)) {
      const float area = area_of(box);
      float* __restrict best_of = best;
      std::int32_t* __restrict which_of = which;
      for (std::size_t n = 0; n < kBlock; ++n) {
        const float iou = anchors.iou(n, box, area);
        overlaps[n] = iou;
        which_of[n] = iou > best_of[n] ? object : which_of[n];
        best_of[n] = iou > best_of[n] ? iou : best_of[n];
      }
      // pairwise halves: the compiler vectorizes this, but not a running maximum
      for (std::size_t half = kBlock / 2; half > 0; half /= 2) {
        for (std::size_t n = 0; n < half; ++n) {
          overlaps[n] = overlaps[n] > overlaps[n + half] ? overlaps[n] : overlaps[n + half];
        }
      }
    });
    return overlaps[0];
  }

  void find_chosen(const Block& block, const float* best, std::int32_t* chosen) const {
    const float* highest = highest_.data() + block.image * blocks_ * input_.max_objects;
    const float block_best = *std::max_element(best, best + block.count);
    BoxLanes<kBlock> anchors;
    bool loaded = false;
    for (std::int64_t object = 0; object < input_.counts[block.image]; ++object) {
      // no anchor of the block is the best of any object, as in most blocks
      if (block_best < highest[object]) continue;
      if (!loaded) load(block, anchors);
      loaded = true;
      const float* box = object_box(block.image, object);
      const float area = area_of(box), wanted = highest[object];
      run_at(level_, [&]() __attribute__((always_inline)) {
        for (std::size_t n = 0; n < kBlock; ++n) chosen[n] |= anchors.iou(n, box, area) == wanted;
      });
    }
  }

  const MatchInput& input_;
  const MatchOptions& options_;
  std::int64_t* matches_;
  Level level_;
  std::size_t blocks_;  // per image
  std::vector<float> best_;
  std::vector<float> highest_;  // [image][block][object]
};

}  // namespace

void match_boxes(const MatchInput& input, const MatchOptions& options, std::int64_t* matches, int num_threads,
                 Level level) {
  Matching matching(input, options, matches, level);
  const auto for_all_blocks = [&](auto&& work) {
    Claims claims(matching.num_tasks());
    run_on_threads(num_threads, [&] {
      for (std::size_t task; claims.next(task);) work(task);
    });
  };
  for_all_blocks([&](std::size_t task) { matching.find_best(task); });
  matching.combine();
  for_all_blocks([&](std::size_t task) { matching.decide(task); });
}

}  // namespace shoal

// Updates that need the norms of a tensor before they move its weights: pass 1 measures, pass 2 moves, both in blocks
// that threads claim. Both are bound by memory bandwidth.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/parallel.h"

namespace shoal {

// Elements per block, the unit of work and of the sums of squares; independent of the number of threads.
inline constexpr std::size_t kBlock = 16384;
// Elements whose squares are summed by themselves; a block adds up its units, a tensor its blocks. So a tensor may be cut
// at multiples of a unit, and the sums of its pieces give those of the whole (unit_sums.h).
inline constexpr std::size_t kSumUnit = 2048;
// Pass 1 and pass 2 alternate over waves of tensors of about this many elements, so that pass 2 finds the data of
// pass 1 (8 to 12 bytes per element) in the caches; a larger tensor is a wave of its own.
inline constexpr std::size_t kWaveElements = std::size_t{1} << 19;
// Elements of the next wave's pass 1 that precede a wave's pass 2: work for threads that would otherwise sleep until
// the others have measured their last blocks.
inline constexpr std::size_t kLeadElements = 4 * kBlock;
inline constexpr std::size_t kElementsPerThread = 32768;

// Sums of squares over all tensors: of the scaled gradients, and of the weights before the update.
struct Norms {
  double grad_sq;
  double weight_sq;
};

// A block of one tensor, the item of work.
struct Piece {
  std::size_t tensor;
  std::size_t begin;
  std::size_t count;
};

// All blocks, and the index of each tensor's first block (with one entry past the last).
struct Plan {
  std::vector<Piece> pieces;
  std::vector<std::size_t> first_of_tensor;
};

template <class Tensor>
Plan plan_of(std::span<const Tensor> tensors) {
  Plan plan;
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    plan.first_of_tensor.push_back(plan.pieces.size());
    for (std::size_t begin = 0; begin < tensors[tensor].count; begin += kBlock) {
      plan.pieces.push_back({tensor, begin, std::min(kBlock, tensors[tensor].count - begin)});
    }
  }
  plan.first_of_tensor.push_back(plan.pieces.size());
  return plan;
}

template <class Tensor>
int threads_for(std::span<const Tensor> tensors, int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + " must be at least 1");
  }
  std::size_t num_elements = 0;
  for (const Tensor& tensor : tensors) num_elements += tensor.count;
  const std::size_t worthwhile = 1 + num_elements / kElementsPerThread;
  return static_cast<int>(std::min(static_cast<std::size_t>(num_threads), worthwhile));
}

// An update, shared by the threads of one call. Rule has
//   Sums: of a block, with at least grad_sq and weight_sq;
//   Sums measure(const Piece&): pass 1;
//   void settle(std::size_t tensor, std::span<const Sums>): once per tensor, with the sums of its blocks;
//   void move(const Piece&, Sums&): pass 2; may add to the sums what pass 1 did not need.
template <class Tensor, class Rule>
class TwoPasses {
 public:
  using Sums = typename Rule::Sums;

  TwoPasses(std::span<const Tensor> tensors, Rule& rule)
      : tensors_(tensors), rule_(rule), plan_(plan_of(tensors)), sums_(plan_.pieces.size()) {
    order_waves();
    missing_ = std::vector<std::atomic<std::size_t>>(waves_.size());
    for (std::size_t wave = 0; wave < waves_.size(); ++wave) {
      missing_[wave] = 1 + waves_[wave].end_block - waves_[wave].begin_block;
    }
  }

  Norms run(int num_threads) {
    Claims claims(tasks_.size());
    run_on_threads(threads_for(tensors_, num_threads), [&] { work(claims); });
    Norms norms{0.0, 0.0};
    for (const Sums& sums : sums_) {
      norms.grad_sq += sums.grad_sq;
      norms.weight_sq += sums.weight_sq;
    }
    return norms;
  }

 private:
  struct Task {
    std::size_t piece;
    std::size_t wave;
    int pass;
  };
  struct Wave {  // the tensors [first, end) and their blocks
    std::size_t first;
    std::size_t end;
    std::size_t begin_block;
    std::size_t end_block;
  };

  // Pass 1 over a wave and a little further, then pass 2 over the wave backwards: the blocks that pass 1 has left in
  // the caches come first.
  void order_waves() {
    std::vector<std::size_t> wave_of_block;
    for (std::size_t first = 0, end; first < tensors_.size(); first = end) {
      std::size_t num_elements = tensors_[first].count;
      for (end = first + 1; end < tensors_.size(); ++end) {
        num_elements += tensors_[end].count;
        if (num_elements > kWaveElements) break;
      }
      waves_.push_back({first, end, plan_.first_of_tensor[first], plan_.first_of_tensor[end]});
      wave_of_block.resize(plan_.first_of_tensor[end], waves_.size() - 1);
    }
    std::size_t next = 0;  // block for pass 1
    for (const Wave& wave : waves_) {
      const std::size_t limit = wave.end_block;
      for (std::size_t lead = 0; next < wave_of_block.size() && (next < limit || lead < kLeadElements); ++next) {
        tasks_.push_back({next, wave_of_block[next], 1});
        if (next >= limit) lead += plan_.pieces[next].count;
      }
      for (std::size_t at = limit; at-- > wave.begin_block;) tasks_.push_back({at, wave_of_block[at], 2});
    }
  }

  // Runs on each thread: claims tasks in order. A task of pass 2 waits for the norms of its wave while another thread
  // still measures a block of it.
  void work(Claims& claims) {
    for (std::size_t at; claims.next(at);) {
      const Task& task = tasks_[at];
      std::atomic<std::size_t>& missing = missing_[task.wave];
      const Piece& piece = plan_.pieces[task.piece];
      if (task.pass == 1) {
        sums_[task.piece] = rule_.measure(piece);
        if (missing.fetch_sub(1) == 2) {  // the last block: only the norms remain
          for (std::size_t t = waves_[task.wave].first; t < waves_[task.wave].end; ++t) settle(t);
          missing.store(0);
          missing.notify_all();
        }
      } else {
        for (std::size_t left; (left = missing.load()) != 0;) missing.wait(left);
        rule_.move(piece, sums_[task.piece]);
      }
    }
  }

  void settle(std::size_t tensor) {
    const std::size_t begin = plan_.first_of_tensor[tensor], end = plan_.first_of_tensor[tensor + 1];
    rule_.settle(tensor, std::span<const Sums>(sums_).subspan(begin, end - begin));
  }

  std::span<const Tensor> tensors_;
  Rule& rule_;
  Plan plan_;
  std::vector<Sums> sums_;
  std::vector<Task> tasks_;
  std::vector<Wave> waves_;
  std::vector<std::atomic<std::size_t>> missing_;  // 1 + the wave's blocks that pass 1 has not finished, or 0
};

}  // namespace shoal

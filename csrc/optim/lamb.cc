#include "optim/lamb.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "base/simd.h"

namespace shoal {
namespace {

struct Block {
  float* weight;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
};

struct BlockSums {
  double grad_sq, weight_sq, update_sq;
};

struct BlockOptions {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, unbias1, unbias2, eps, weight_decay, grad_scale;
};

}  // namespace

#define SHOAL_KERNELS "optim/lamb_kernels.inc"
#include "base/every_level.inc"

namespace {

struct Kernels {
  BlockSums (*moments)(const BlockOptions&, const Block&, std::size_t count);
  void (*apply)(const BlockOptions&, const Block&, std::size_t count, float step_size);
  double (*squares)(const float*, std::size_t count);
};

Kernels kernels_of(Level level) {
  require_level(level);
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return {avx512::moments_block, avx512::apply_block, avx512::squares_block};
    case Level::avx2: return {avx2::moments_block, avx2::apply_block, avx2::squares_block};
#endif
    default: return {portable::moments_block, portable::apply_block, portable::squares_block};
  }
}

BlockOptions block_options(const LambOptions& o, double step) {
  const auto unbias = [&](double beta) { return o.bias_correction ? 1.0 / (1.0 - std::pow(beta, step)) : 1.0; };
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(o.beta1), f(1.0 - o.beta1), f(o.beta2), f(1.0 - o.beta2), f(unbias(o.beta1)), f(unbias(o.beta2)),
          f(o.eps),   f(o.weight_decay), f(o.grad_scale)};
}

class LambRule {
 public:
  using Sums = BlockSums;

  LambRule(std::span<const MomentsTensor> tensors, const LambOptions& options, const Kernels& kernels)
      : tensors_(tensors), options_(options), kernels_(kernels), step_size_(tensors.size()) {
    for (const MomentsTensor& tensor : tensors) block_options_.push_back(block_options(options, tensor.step));
  }

  Sums measure(const Piece& piece) const {
    return kernels_.moments(block_options_[piece.tensor], block_of(piece), piece.count);
  }

  void settle(std::size_t tensor, std::span<const Sums> blocks) {
    double weight_sq = 0.0, update_sq = 0.0;
    for (const Sums& sums : blocks) {
      weight_sq += sums.weight_sq;
      update_sq += sums.update_sq;
    }
    step_size_[tensor] = lamb_step_size(options_, weight_sq, update_sq);
  }

  void move(const Piece& piece, const Sums&) const {
    kernels_.apply(block_options_[piece.tensor], block_of(piece), piece.count, step_size_[piece.tensor]);
  }

 private:
  Block block_of(const Piece& piece) const {
    const MomentsTensor& t = tensors_[piece.tensor];
    return {t.weight + piece.begin, t.grad + piece.begin, t.exp_avg + piece.begin, t.exp_avg_sq + piece.begin};
  }

  std::span<const MomentsTensor> tensors_;
  const LambOptions& options_;
  Kernels kernels_;
  std::vector<BlockOptions> block_options_;
  std::vector<float> step_size_;  // learning rate times trust ratio, per tensor
};

}  // namespace

Norms lamb_step(std::span<const MomentsTensor> tensors, const LambOptions& options, int num_threads, Level level) {
  LambRule rule(tensors, options, kernels_of(level));
  return TwoPasses(tensors, rule).run(num_threads);
}

void lamb_measure(const MomentsTensor& piece, const LambOptions& options, UnitSums* sums, Level level) {
  const Kernels kernels = kernels_of(level);
  const BlockOptions given = block_options(options, piece.step);
  for (std::size_t at = 0; at < piece.count; at += kSumUnit) {
    const Block unit{piece.weight + at, piece.grad + at, piece.exp_avg + at, piece.exp_avg_sq + at};
    const BlockSums of_unit = kernels.moments(given, unit, std::min(kSumUnit, piece.count - at));
    *sums++ = {of_unit.grad_sq, of_unit.weight_sq, of_unit.update_sq};
  }
}

float lamb_step_size(const LambOptions& options, double weight_sq, double update_sq) {
  const bool has_ratio = options.trust_ratio && weight_sq > 0.0 && update_sq > 0.0;
  const double ratio = has_ratio ? std::sqrt(weight_sq) / std::sqrt(update_sq) : 1.0;
  return static_cast<float>(options.learning_rate * ratio);
}

void lamb_move(const MomentsTensor& piece, const LambOptions& options, float step_size, Level level) {
  const Block block{piece.weight, piece.grad, piece.exp_avg, piece.exp_avg_sq};
  kernels_of(level).apply(block_options(options, piece.step), block, piece.count, step_size);
}

void squares_of_units(const float* values, std::size_t count, UnitSums* sums, Level level) {
  const Kernels kernels = kernels_of(level);
  for (std::size_t at = 0; at < count; at += kSumUnit) {
    *sums++ = {kernels.squares(values + at, std::min(kSumUnit, count - at)), 0.0, 0.0};
  }
}

double sum_of_squares(std::span<const ConstTensor> tensors, int num_threads, Level level) {
  const Kernels kernels = kernels_of(level);
  const Plan plan = plan_of(tensors);
  std::vector<double> sums(plan.pieces.size());
  Claims claims(plan.pieces.size());
  run_on_threads(threads_for(tensors, num_threads), [&] {
    for (std::size_t at; claims.next(at);) {
      const Piece& piece = plan.pieces[at];
      sums[at] = kernels.squares(tensors[piece.tensor].values + piece.begin, piece.count);
    }
  });
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace shoal

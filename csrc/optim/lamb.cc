#include "optim/lamb.h"

#include <algorithm>
#include <cmath>
#include <limits>
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

using Steps = LansSteps;  // LAMB needs the first

struct BlockOptions {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, unbias1, unbias2, eps, weight_decay, grad_scale;
};

}  // namespace

#define SHOAL_KERNELS "optim/lamb_kernels.inc"
#include "base/every_level.inc"

namespace {

struct Kernels {
  BlockSums (*moments)(const BlockOptions&, const Block&, std::size_t count);
  void (*apply)(const BlockOptions&, const Block&, std::size_t count, Steps steps);
  double (*squares)(const float*, std::size_t count);
};

template <bool kLans = false>
Kernels kernels_of(Level level) {
  require_level(level);
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return {avx512::moments_block<kLans>, avx512::apply_block<kLans>, avx512::squares_block};
    case Level::avx2: return {avx2::moments_block<kLans>, avx2::apply_block<kLans>, avx2::squares_block};
#endif
    default: return {portable::moments_block<kLans>, portable::apply_block<kLans>, portable::squares_block};
  }
}

BlockOptions block_options(const LambOptions& o, double step) {
  const auto unbias = [&](double beta) { return o.bias_correction ? 1.0 / (1.0 - std::pow(beta, step)) : 1.0; };
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(o.beta1), f(1.0 - o.beta1), f(o.beta2), f(1.0 - o.beta2), f(unbias(o.beta1)), f(unbias(o.beta2)),
          f(o.eps),   f(o.weight_decay), f(o.grad_scale)};
}

BlockOptions block_options(const MomentsOptions& o, double step) {
  return block_options({o.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_scale, true, true}, step);
}

double trust_ratio(double weight_sq, double update_sq) {
  return weight_sq > 0.0 && update_sq > 0.0 ? std::sqrt(weight_sq) / std::sqrt(update_sq) : 1.0;
}

// Both optimizers; `steps_of` returns the sizes of a tensor's updates from its sums.
template <class StepsOf>
class MomentsRule {
 public:
  using Sums = BlockSums;

  MomentsRule(std::span<const MomentsTensor> tensors, const std::vector<BlockOptions>& options, const Kernels& kernels,
              StepsOf steps_of)
      : tensors_(tensors), options_(options), kernels_(kernels), steps_of_(steps_of), steps_(tensors.size()) {}

  Sums measure(const Piece& piece) const {
    return kernels_.moments(options_[piece.tensor], block_of(piece), piece.count);
  }

  void settle(std::size_t tensor, std::span<const Sums> blocks) {
    UnitSums total;
    for (const Sums& sums : blocks) {
      total.grad_sq += sums.grad_sq;
      total.weight_sq += sums.weight_sq;
      total.other_sq += sums.update_sq;
    }
    steps_[tensor] = steps_of_(total);
  }

  void move(const Piece& piece, const Sums&) const {
    kernels_.apply(options_[piece.tensor], block_of(piece), piece.count, steps_[piece.tensor]);
  }

 private:
  Block block_of(const Piece& piece) const {
    const MomentsTensor& t = tensors_[piece.tensor];
    return {t.weight + piece.begin, t.grad + piece.begin, t.exp_avg + piece.begin, t.exp_avg_sq + piece.begin};
  }

  std::span<const MomentsTensor> tensors_;
  const std::vector<BlockOptions>& options_;
  const Kernels kernels_;
  const StepsOf steps_of_;
  std::vector<Steps> steps_;  // per tensor
};

Block block_of(const MomentsTensor& piece, std::size_t at = 0) {
  return {piece.weight + at, piece.grad + at, piece.exp_avg + at, piece.exp_avg_sq + at};
}

void measure(const MomentsTensor& piece, const BlockOptions& options, const Kernels& kernels, UnitSums* sums) {
  for (std::size_t at = 0; at < piece.count; at += kSumUnit) {
    const BlockSums of_unit = kernels.moments(options, block_of(piece, at), std::min(kSumUnit, piece.count - at));
    *sums++ = {of_unit.grad_sq, of_unit.weight_sq, of_unit.update_sq};
  }
}

// Returns the sums of squares of blocks of tensors.
template <class Tensor, class ValuesOf>
std::vector<double> squares_of_blocks(std::span<const Tensor> tensors, const Plan& plan, ValuesOf values_of, int num_threads,
                                      const Kernels& kernels) {
  std::vector<double> sums(plan.pieces.size());
  Claims claims(plan.pieces.size());
  run_on_threads(threads_for(tensors, num_threads), [&] {
    for (std::size_t at; claims.next(at);) {
      const Piece& piece = plan.pieces[at];
      sums[at] = kernels.squares(values_of(tensors[piece.tensor]) + piece.begin, piece.count);
    }
  });
  return sums;
}

}  // namespace

Norms lamb_step(std::span<const MomentsTensor> tensors, const LambOptions& options, int num_threads, Level level) {
  std::vector<BlockOptions> of_tensors;
  for (const MomentsTensor& tensor : tensors) of_tensors.push_back(block_options(options, tensor.step));
  const auto steps_of = [&](const UnitSums& total) { return Steps{lamb_step_size(options, total.weight_sq, total.other_sq)}; };
  MomentsRule rule(tensors, of_tensors, kernels_of(level), steps_of);
  return TwoPasses(tensors, rule).run(num_threads);
}

void lamb_measure(const MomentsTensor& piece, const LambOptions& options, UnitSums* sums, Level level) {
  measure(piece, block_options(options, piece.step), kernels_of(level), sums);
}

float lamb_step_size(const LambOptions& options, double weight_sq, double update_sq) {
  return static_cast<float>(options.learning_rate * (options.trust_ratio ? trust_ratio(weight_sq, update_sq) : 1.0));
}

void lamb_move(const MomentsTensor& piece, const LambOptions& options, float step_size, Level level) {
  kernels_of(level).apply(block_options(options, piece.step), block_of(piece), piece.count, {step_size});
}

Norms lans_step(std::span<const MomentsTensor> tensors, const MomentsOptions& options, int num_threads, Level level) {
  const Kernels kernels = kernels_of<true>(level);
  const Plan plan = plan_of(tensors);
  const auto squares = squares_of_blocks(tensors, plan, [](const MomentsTensor& t) { return t.grad; }, num_threads, kernels);
  double all_grad_sq = 0.0;
  std::vector<BlockOptions> of_tensors;
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    double grad_sq = 0.0;
    for (std::size_t at = plan.first_of_tensor[tensor]; at < plan.first_of_tensor[tensor + 1]; ++at) grad_sq += squares[at];
    all_grad_sq += grad_sq;
    MomentsOptions of_tensor = options;
    of_tensor.grad_scale = lans_grad_scale(options, grad_sq);
    of_tensors.push_back(block_options(of_tensor, tensors[tensor].step));
  }
  const auto steps_of = [&](const UnitSums& total) { return lans_step_sizes(options, total); };
  MomentsRule rule(tensors, of_tensors, kernels, steps_of);
  const Norms norms = TwoPasses(tensors, rule).run(num_threads);
  return {all_grad_sq * options.grad_scale * options.grad_scale, norms.weight_sq};
}

double lans_grad_scale(const MomentsOptions& options, double grad_sq) {
  const double norm = std::sqrt(grad_sq) * options.grad_scale + options.eps;
  return norm > 0.0 ? std::min(options.grad_scale / norm, static_cast<double>(std::numeric_limits<float>::max())) : 1.0;
}

void lans_measure(const MomentsTensor& piece, const MomentsOptions& options, UnitSums* sums, Level level) {
  measure(piece, block_options(options, piece.step), kernels_of<true>(level), sums);
}

LansSteps lans_step_sizes(const MomentsOptions& options, const UnitSums& total) {
  const auto size = [&](double share, double update_sq) {
    return static_cast<float>(options.learning_rate * share * trust_ratio(total.weight_sq, update_sq));
  };
  return {size(options.beta1, total.other_sq), size(1.0 - options.beta1, total.grad_sq)};
}

void lans_move(const MomentsTensor& piece, const MomentsOptions& options, LansSteps steps, Level level) {
  kernels_of<true>(level).apply(block_options(options, piece.step), block_of(piece), piece.count, steps);
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
  const auto sums = squares_of_blocks(tensors, plan, [](const ConstTensor& t) { return t.values; }, num_threads, kernels);
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace shoal

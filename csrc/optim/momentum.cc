#include "optim/momentum.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/simd.h"

namespace shoal {
namespace {

struct Block {
  float* weight;
  const float* grad;
  float* momentum;
};

// decayed = of_grad g + of_weight w
struct Decay {
  float of_grad, of_weight;
};

struct BlockSums {
  double grad_sq = 0.0, weight_sq = 0.0, decayed_sq = 0.0;
};

}  // namespace

#define SHOAL_KERNELS "optim/momentum_kernels.inc"
#include "base/every_level.inc"

namespace {

struct Kernels {
  double (*squares)(const float*, std::size_t count);
  BlockSums (*measure)(const Decay&, const Block&, std::size_t count);
  double (*move)(const Motion&, const Block&, std::size_t count);
};

Kernels kernels_of(Level level) {
  require_level(level);
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return {avx512::squares_block, avx512::measure_block, avx512::move_block};
    case Level::avx2: return {avx2::squares_block, avx2::measure_block, avx2::move_block};
#endif
    default: return {portable::squares_block, portable::measure_block, portable::move_block};
  }
}

float narrow(double x) { return static_cast<float>(x); }

double lars_ratio(const LarsOptions& o, const UnitSums& sums) {
  if (!o.trust_ratio) return 1.0;
  const double weight_norm = std::sqrt(sums.weight_sq);
  if (o.clips) {
    const bool both = sums.weight_sq > 0.0 && sums.other_sq > 0.0;
    return std::min(1.0, (both ? o.eta * weight_norm / std::sqrt(sums.other_sq) : 1.0) / o.learning_rate);
  }
  const double grad_norm = std::sqrt(sums.grad_sq);
  const bool both = sums.weight_sq > 0.0 && sums.grad_sq > 0.0;
  return both ? o.eta * weight_norm / (grad_norm + o.weight_decay * weight_norm + o.eps) : 1.0;
}

// Common part of LARS and NovoGrad: a derived class turns a tensor's sums into its motion.
class MomentumRule {
 public:
  using Sums = BlockSums;

  void move(const Piece& piece, Sums& sums) const {
    sums.weight_sq = kernels_.move(motions_[piece.tensor], block_of(piece), piece.count);
  }

 protected:
  MomentumRule(std::span<const MomentumTensor> tensors, double grad_scale, Level level)
      : motions_(tensors.size()), kernels_(kernels_of(level)), tensors_(tensors), grad_scale_(grad_scale) {}

  Block block_of(const Piece& piece) const {
    const MomentumTensor& t = tensors_[piece.tensor];
    return {t.weight + piece.begin, t.grad + piece.begin, t.momentum + piece.begin};
  }

  double scaled_sq(double grad_sq) const { return grad_sq * grad_scale_ * grad_scale_; }

  std::vector<Motion> motions_;  // per tensor

  Kernels kernels_;

 private:
  std::span<const MomentumTensor> tensors_;
  double grad_scale_;
};

class LarsRule : public MomentumRule {
 public:
  LarsRule(std::span<const MomentumTensor> tensors, const LarsOptions& options, Level level)
      : MomentumRule(tensors, options.grad_scale, level), options_(options) {}

  Sums measure(const Piece& piece) const {
    const Decay decay{narrow(options_.grad_scale), narrow(options_.weight_decay)};
    Sums sums = kernels_.measure(decay, block_of(piece), piece.count);
    sums.grad_sq = scaled_sq(sums.grad_sq);
    return sums;
  }

  void settle(std::size_t tensor, std::span<const Sums> blocks) {
    UnitSums all;
    for (const Sums& sums : blocks) {
      all.grad_sq += sums.grad_sq;
      all.weight_sq += sums.weight_sq;
      all.other_sq += sums.decayed_sq;
    }
    motions_[tensor] = lars_motion(options_, all);
  }

 private:
  const LarsOptions& options_;
};

class NovoGradRule : public MomentumRule {
 public:
  NovoGradRule(std::span<const MomentumTensor> tensors, std::span<const NovoGradState> states,
               const NovoGradOptions& options, Level level)
      : MomentumRule(tensors, options.grad_scale, level), states_(states), options_(options) {}

  // The norm of the weights is only reported, so pass 2 measures it.
  Sums measure(const Piece& piece) const {
    return {.grad_sq = scaled_sq(kernels_.squares(block_of(piece).grad, piece.count))};
  }

  void settle(std::size_t tensor, std::span<const Sums> blocks) {
    double square = 0.0;
    for (const Sums& sums : blocks) square += sums.grad_sq;
    motions_[tensor] = novograd_motion(options_, states_[tensor], square);
  }

 private:
  std::span<const NovoGradState> states_;
  const NovoGradOptions& options_;
};

}  // namespace

void lars_measure(const MomentumTensor& piece, double weight_decay, UnitSums* sums, Level level) {
  const Kernels kernels = kernels_of(level);
  const Decay decay{1.0f, narrow(weight_decay)};
  for (std::size_t at = 0; at < piece.count; at += kSumUnit) {
    const Block unit{piece.weight + at, piece.grad + at, piece.momentum + at};
    const BlockSums of_unit = kernels.measure(decay, unit, std::min(kSumUnit, piece.count - at));
    *sums++ = {of_unit.grad_sq, of_unit.weight_sq, of_unit.decayed_sq};
  }
}

Motion lars_motion(const LarsOptions& o, const UnitSums& total) {
  const double inside = lars_ratio(o, total) * (o.clips ? 1.0 : o.learning_rate);
  const double outside = o.clips ? o.learning_rate : 1.0;
  return {.keep = narrow(o.momentum),
          .of_grad = narrow(inside * o.grad_scale),
          .of_weight = narrow(inside * o.weight_decay),
          .by_momentum = narrow(outside * (o.nesterov ? o.momentum : 1.0)),
          .by_change = narrow(o.nesterov ? outside : 0.0),
          .by_weight = 0.0f};
}

Motion novograd_motion(const NovoGradOptions& o, const NovoGradState& state, double grad_sq) {
  const double before = *state.norm_sq;
  const bool begins = state.step == 1.0 && !o.init_zero;
  *state.norm_sq = narrow(begins ? grad_sq : o.beta2 * before + (1.0 - o.beta2) * grad_sq);
  double norm = std::sqrt(static_cast<double>(*state.norm_sq)), rate = o.learning_rate;
  if (o.bias_correction) {
    norm /= std::sqrt(1.0 - std::pow(o.beta2, state.step));
    rate /= 1.0 - std::pow(o.beta1, state.step);
  }
  const double share = o.grad_averaging ? 1.0 - o.beta1 : 1.0, divisor = norm + o.eps;
  const bool inside = o.reg_inside_moment;
  return {.keep = narrow(o.beta1),
          .of_grad = narrow(share * o.grad_scale / (inside ? divisor : 1.0)),
          .of_weight = narrow(inside ? share * o.weight_decay : 0.0),
          .by_momentum = narrow(rate / (inside ? 1.0 : divisor)),
          .by_change = 0.0f,
          .by_weight = narrow(inside ? 0.0 : o.learning_rate * o.weight_decay)};
}

void move_by(const MomentumTensor& piece, const Motion& motion, Level level) {
  kernels_of(level).move(motion, {piece.weight, piece.grad, piece.momentum}, piece.count);
}

Norms lars_step(std::span<const MomentumTensor> tensors, const LarsOptions& options, int num_threads,
                Level level) {
  LarsRule rule(tensors, options, level);
  return TwoPasses(tensors, rule).run(num_threads);
}

Norms novograd_step(std::span<const MomentumTensor> tensors, std::span<const NovoGradState> states,
                    const NovoGradOptions& options, int num_threads, Level level) {
  NovoGradRule rule(tensors, states, options, level);
  return TwoPasses(tensors, rule).run(num_threads);
}

}  // namespace shoal

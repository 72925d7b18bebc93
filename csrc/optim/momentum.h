// LARS and NovoGrad on the CPU: pass 1 measures the norms of a tensor's gradient and weights, pass 2 adds a linear
// combination of both to the momentum and moves the weights. src/shoal/optim/{lars,novograd}.py have the formulas.
#pragma once

#include <cstddef>
#include <span>

#include "base/cpu.h"
#include "optim/two_passes.h"
#include "optim/unit_sums.h"

namespace shoal {

// One fp32 tensor and its momentum.
struct MomentumTensor {
  float* weight;
  const float* grad;
  float* momentum;
  std::size_t count;
};

// How a tensor moves, from its norms:
//   change = of_grad g + of_weight w
//   m = keep m + change
//   w = w - (by_momentum m + by_change change + by_weight w)
struct Motion {
  float keep, of_grad, of_weight, by_momentum, by_change, by_weight;
};

struct LarsOptions {
  double learning_rate;
  double momentum;
  double weight_decay;
  double eta;
  double eps;
  double grad_scale;  // gradients are multiplied by it on the fly
  bool clips;         // LARC: the learning rate is not in the momentum, and no ratio exceeds 1
  bool nesterov;
  bool trust_ratio;  // off: the ratio is 1
};

// All in fp32, norms and ratios in double. Squares are summed in blocks whose order does not depend on the number of
// threads, so the bits of the result do not either.
Norms lars_step(std::span<const MomentumTensor> tensors, const LarsOptions& options, int num_threads,
                Level level = best_level());

// NovoGrad's state of a tensor besides its momentum: the running squared norm, and the number of this update from 1.
struct NovoGradState {
  float* norm_sq;
  double step;
};

struct NovoGradOptions {
  double learning_rate;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double grad_scale;
  bool bias_correction;
  bool grad_averaging;
  bool init_zero;
  bool reg_inside_moment;
};

// `states` are those of `tensors`, in their order.
Norms novograd_step(std::span<const MomentumTensor> tensors, std::span<const NovoGradState> states,
                    const NovoGradOptions& options, int num_threads, Level level = best_level());

// The same for a piece of a tensor that begins at a multiple of kSumUnit: pass 1 of LARS, which writes the sums of each unit
// (the third is of the gradients with decay; NovoGrad needs squares_of_units() only), the motion that the totals give, and
// pass 2 of both.
void lars_measure(const MomentumTensor& piece, double weight_decay, UnitSums* sums, Level level = best_level());
Motion lars_motion(const LarsOptions& options, const UnitSums& total);
Motion novograd_motion(const NovoGradOptions& options, const NovoGradState& state, double grad_sq);
void move_by(const MomentumTensor& piece, const Motion& motion, Level level = best_level());

}  // namespace shoal

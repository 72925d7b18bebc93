// LAMB and LANS on the CPU: per tensor, pass 1 updates the moments and measures the norms, pass 2 applies the update,
// which it recomputes from the moments (cheaper than storing it).
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "base/cpu.h"
#include "optim/two_passes.h"
#include "optim/unit_sums.h"

namespace shoal {

// One fp32 tensor and its state; `step` counts from 1 and includes this update.
struct MomentsTensor {
  float* weight;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  std::size_t count;
  double step;
};

struct LambOptions {
  double learning_rate;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double grad_scale;  // gradients are multiplied by it on the fly
  bool bias_correction;
  bool trust_ratio;  // off: the ratio is 1
};

// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2, u = m^ / (sqrt(v^) + eps) + weight_decay w,
// w = w - learning_rate ratio u, ratio = |w| / |u| if both are above 0, else 1.
// All in fp32. Squares are summed in blocks whose order does not depend on the number of threads, so the bits of the
// result do not either.
Norms lamb_step(std::span<const MomentsTensor> tensors, const LambOptions& options, int num_threads,
                Level level = best_level());

// The same for a piece of a tensor that begins at a multiple of kSumUnit, in three parts: pass 1, which writes the sums of
// each unit (the third is of the update), the factor that their totals give, and pass 2.
void lamb_measure(const MomentsTensor& piece, const LambOptions& options, UnitSums* sums, Level level = best_level());
float lamb_step_size(const LambOptions& options, double weight_sq, double update_sq);
void lamb_move(const MomentsTensor& piece, const LambOptions& options, float step_size, Level level = best_level());

// Of LANS and AdamW.
struct MomentsOptions {
  double learning_rate;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double grad_scale;  // gradients are multiplied by it on the fly
};

// g = g / (|g| + eps) of each tensor, m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
// u_m = m^ / (sqrt(v^) + eps) + weight_decay w, u_g = g / (sqrt(v^) + eps) + weight_decay w,
// w = w - learning_rate (beta1 ratio_m u_m + (1 - beta1) ratio_g u_g), a ratio as LAMB's.
// The bits are as independent of threads. A pass over the gradients comes first, for their norms.
Norms lans_step(std::span<const MomentsTensor> tensors, const MomentsOptions& options, int num_threads,
                Level level = best_level());

// The same for a piece of a tensor: the factor that normalises its gradient, from the sum of squares of the whole; pass 1
// with that factor as grad_scale, whose sums are of u_g (in grad_sq), of the weights and of u_m; the sizes of both updates
// in w, that of u_m first; and pass 2.
double lans_grad_scale(const MomentsOptions& options, double grad_sq);
void lans_measure(const MomentsTensor& piece, const MomentsOptions& options, UnitSums* sums, Level level = best_level());
using LansSteps = std::array<float, 2>;
LansSteps lans_step_sizes(const MomentsOptions& options, const UnitSums& total);
void lans_move(const MomentsTensor& piece, const MomentsOptions& options, LansSteps steps, Level level = best_level());

// Returns the sum of squares over all tensors, in the same fixed order.
struct ConstTensor {
  const float* values;
  std::size_t count;
};
double sum_of_squares(std::span<const ConstTensor> tensors, int num_threads, Level level = best_level());
// Writes the sums of squares of the units of a piece as grad_sq; the others become 0.
void squares_of_units(const float* values, std::size_t count, UnitSums* sums, Level level = best_level());

}  // namespace shoal

// Adafactor on the CPU (shoal/optim/adafactor.py has the formulas). A tensor is handled in parts of kFactorPart numbers, as
// servers have them; what depends on whole rows and columns is decided from the sums of the parts, in their order. So the
// bits depend neither on the number of threads nor on where the parts are.
#pragma once

#include <cstddef>
#include <span>

#include "base/cpu.h"
#include "optim/factor_parts.h"
#include "optim/two_passes.h"
#include "optim/unit_sums.h"

namespace shoal {

// Writes the sums of the squared gradient over the columns and rows of a part.
void adafactor_squares(const float* grad, const FactorPart& part, float* sums);

// Blends the sums of all parts of a matrix of `count` numbers into its rows and columns, and writes the factors of all parts.
void adafactor_decide(const float* sums, std::size_t count, std::size_t columns, double share, double eps1, float* row_var,
                      float* col_var, float* factors);

// Turn the gradient of a part into its update: by factors, or where nothing is factored by its second moment, after that
// takes the gradient in.
void adafactor_normalise(float* grad, const FactorPart& part, const float* factors);
void adafactor_normalise(float* grad, float* variance, std::size_t count, float share, float eps1);

// Writes the sums of squares of the weights and of the update (the third) for each unit.
void adafactor_measure(const float* weights, const float* updates, std::size_t count, UnitSums* sums,
                       Level level = best_level());

// w = keep w - size u
struct AdafactorMove {
  float keep, size;
};
AdafactorMove adafactor_move_of(double learning_rate, double weight_decay, const UnitSums& total, std::size_t count);
void adafactor_move(float* weights, const float* updates, std::size_t count, const AdafactorMove& move);

// One fp32 tensor and its state: rows and columns of a matrix, or where `columns` is 0 the second moment in `row_var`.
struct AdafactorTensor {
  float* weight;
  const float* grad;
  float* row_var;
  float* col_var;
  std::size_t count;
  std::size_t columns;
  double share;  // 1 - beta2 of this step
};

struct AdafactorOptions {
  double learning_rate;
  double eps1;
  double weight_decay;
  double grad_scale;  // gradients are multiplied by it on the fly
};

Norms adafactor_step(std::span<const AdafactorTensor> tensors, const AdafactorOptions& options, int num_threads,
                     Level level = best_level());

}  // namespace shoal

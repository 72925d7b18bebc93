// AdamW and SGD on the CPU, in one pass: no number of a tensor depends on another, so a tensor that is cut anywhere gives
// the same bits. These kernels define the bits of both optimizers.
#pragma once

#include <span>

#include "base/cpu.h"
#include "optim/lamb.h"
#include "optim/momentum.h"
#include "optim/two_passes.h"

namespace shoal {

// In this order, fma(x, y, z) = x y + z rounded once, every other operation rounded by itself:
//   w = w (1 - learning_rate weight_decay)
//   m = fma(1 - beta1, g - m, m)
//   v = fma((1 - beta2) g, g, beta2 v)
//   w = w + (-learning_rate / (1 - beta1^step) m) / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// Coefficients are computed in double and rounded to fp32, as torch does. Moments have torch's bits; torch's square
// root is not correctly rounded on every machine, so weights may differ from torch's in the last bits.
Norms adamw_step(std::span<const MomentsTensor> tensors, const MomentsOptions& options, int num_threads,
                 Level level = best_level());

struct SgdOptions {
  double learning_rate;
  double momentum;  // 0: the tensors need no momentum
  double weight_decay;
  double grad_scale;
  bool nesterov;
};

//   d = fma(weight_decay, w, g)
//   m = momentum m + d                    (two roundings)
//   d = fma(momentum, m, d) if nesterov, else m
//   w = fma(-learning_rate, d, w)
// These are the bits of torch on a processor with FMA.
Norms sgd_step(std::span<const MomentumTensor> tensors, const SgdOptions& options, int num_threads,
               Level level = best_level());

}  // namespace shoal
